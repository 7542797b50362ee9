import pytest

from ductile.host import memory_bytes


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("memory.max", str(1 << 28), 1 << 28),
        ("memory/memory.limit_in_bytes", str(1 << 28), 1 << 28),
        ("memory.max", "max", None),
        ("memory/memory.limit_in_bytes", str(0x7FFFFFFFFFFFF000), None),  # v1 says "no limit" so
    ],
)
def test_a_container_s_memory_is_what_it_may_use(tmp_path, name, limit, expected):
    machine = memory_bytes(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{limit}\n")
    assert memory_bytes(tmp_path) == (expected or machine)
