import pytest

from ductile.host import is_amd_with_avx512, memory_bytes


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


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", "avx2 avx512f avx512dq", True),
        ("AuthenticAMD", "avx2 fma", False),
        ("GenuineIntel", "avx2 avx512f", False),
    ],
)
def test_a_processor_is_known_by_its_vendor_and_its_vectors(tmp_path, vendor, flags, expected):
    of_one_core = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n\n"
    (tmp_path / "cpuinfo").write_text(of_one_core + of_one_core)
    assert is_amd_with_avx512(tmp_path / "cpuinfo") == expected


def test_a_machine_that_says_nothing_of_its_processor_has_none_in_particular(tmp_path):
    assert not is_amd_with_avx512(tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("Processor\t: AArch64\n")
    assert not is_amd_with_avx512(tmp_path / "cpuinfo")
