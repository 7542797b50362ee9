import errno
import re
import resource
from pathlib import Path

import pytest

from ductile.disk import named
from ductile.error_text import error_text
from ductile.host import is_amd_with_avx512, memory_bytes, shortage
from tests.test_cgroups import fake_proc


@pytest.mark.parametrize(
    ("version", "files", "expected"),
    [
        (2, {"memory.max": str(1 << 28)}, 1 << 28),
        (2, {"job/step/memory.max": "max", "job/memory.max": str(1 << 28)}, 1 << 28),
        (1, {"memory.limit_in_bytes": str(1 << 28)}, 1 << 28),
        (2, {"memory.max": "max"}, None),
        (1, {"memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000)}, None),  # v1 says "no limit" so
    ],
)
def test_a_container_s_or_a_job_s_memory_is_what_it_may_use(tmp_path, version, files, expected):
    machine = memory_bytes(tmp_path)
    own = "/job/step" if "job/memory.max" in files else "/"
    assert memory_bytes(fake_proc(tmp_path, version, own, files)) == (expected or machine)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, "Too many open files"), " (at most 64 open files: ulimit -n)"),
        (BlockingIOError(errno.EAGAIN, "no"), " (at most 64 processes and threads of a user: ulimit -u)"),
        (RuntimeError("can't start new thread"), " (at most 64 processes and threads of a user: ulimit -u)"),
        (OSError(errno.EFBIG, "File too large"), " (at most 64 B in a file: ulimit -f)"),
        (MemoryError(), " (at most 64 B: ulimit -v)"),
        (OSError(errno.ENOMEM, "no"), " (at most 64 B: ulimit -v)"),
        (OSError(errno.ENOSPC, "no"), ""),
        (named(OSError(errno.ENOSPC, "no"), Path("/")), ""),  # says it itself
        (ValueError("no"), ""),
    ],
)
def test_what_was_too_little_is_told_with_its_limit(error, expected, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (64, 64))
    assert shortage(error) == expected
    assert error_text(error).endswith(expected)


def test_a_full_disk_and_memory_tell_what_is_left():
    assert re.fullmatch(r" \([\d.]+ \w+ free\)", shortage(OSError(errno.ENOSPC, "no", "/tmp/nowhere/x")))
    assert re.search(r"the machine has [\d.]+ GB|limit of /", shortage(MemoryError()))


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
