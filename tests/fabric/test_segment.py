"""What one process lets others read: it arrives whole or not at all, and nothing of it stays behind."""

import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ductile.fabric import segment as segment_module
from ductile.fabric.alignment import ALIGNMENT_BYTES
from ductile.fabric.segment import Segment, SegmentUnavailable, map_segment, mapped_for_writing
from tests.ranks import run_alone

TENSORS = [torch.arange(5.0), torch.tensor(7), torch.empty(0), torch.arange(6.0).reshape(2, 3).T.bfloat16()]


def sealed(*tensors: torch.Tensor) -> Segment:
    segment = Segment("ductile-test")
    for tensor in tensors:
        segment.append(tensor)
    segment.seal()
    return segment


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = sealed(*TENSORS)
    yield made
    made.close()


def read(segment: Segment) -> torch.Tensor:
    return map_segment(segment.location, segment.num_bytes, segment.fingerprint)


def test_tensors_lie_where_append_said() -> None:
    segment = Segment("ductile-test")
    offsets = [segment.append(tensor) for tensor in TENSORS]
    segment.seal()
    content = read(segment)
    for offset, tensor in zip(offsets, TENSORS, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        found = content[offset : offset + tensor.numel() * tensor.element_size()].view(tensor.dtype)
        assert torch.equal(found.view(tensor.shape), tensor)
    segment.close()


def test_nobody_can_change_it(segment: Segment) -> None:
    fd = os.open(segment.location, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, segment.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for size_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.truncate(fd, size_bytes)
    os.close(fd)
    with pytest.raises(PermissionError):
        segment.append(torch.ones(1))


def test_nor_where_the_kernel_knows_no_seal_of_future_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "F_SEAL_FUTURE_WRITE", 1 << 30)
    segment = sealed(*TENSORS)
    with pytest.raises(PermissionError):
        segment.append(torch.ones(1))
    segment.close()


def write(location: str, name: str, num_bytes: int, first: int) -> None:
    with mapped_for_writing(location, name, num_bytes) as content:
        content[first::2] = torch.arange(first, num_bytes, 2).to(torch.uint8)


@pytest.mark.parametrize("seal", [segment_module.F_SEAL_FUTURE_WRITE, 1 << 30], ids=["kernel", "old kernel"])
def test_several_processes_fill_one_and_its_owner_seals_it(monkeypatch: pytest.MonkeyPatch, seal: int) -> None:
    monkeypatch.setattr(segment_module, "F_SEAL_FUTURE_WRITE", seal)
    segment = Segment("ductile-test-1", 5000)
    run_alone(write, segment.location, segment.name, 5000, 1)
    write(segment.location, segment.name, 5000, 0)
    with mapped_for_writing(segment.location, segment.name, 5000) as content:
        kept = content.view(50, 100)  # who still refers to what is not mapped any more keeps nobody from sealing it
    segment.seal()
    del kept, content
    assert torch.equal(read(segment), torch.arange(5000).to(torch.uint8))
    with pytest.raises(PermissionError), mapped_for_writing(segment.location, segment.name, 5000):
        pass
    segment.close()


def test_only_the_segment_that_was_named_is_written(segment: Segment) -> None:
    with pytest.raises(SegmentUnavailable, match=r"cannot be written: /proc/\d+/fd/\d+ is /memfd:ductile-test \(del"):
        write(segment.location, "ductile-test-2", segment.num_bytes, 0)
    with pytest.raises(SegmentUnavailable, match="cannot be written: /dev/fd/99999: No such file or directory"):
        write("/dev/fd/99999", "ductile-test", segment.num_bytes, 0)


def test_memory_that_is_not_there_is_an_error_and_nothing_stays() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Segment("ductile-test", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_it_is_sealed_while_the_kernel_holds_a_page_of_it() -> None:
    """A pipe holds pages that are spliced into it, as the kernel holds those that it moves."""
    segment = Segment("ductile-test")
    segment.append(torch.arange(4096.0))
    source, (taker, giver) = os.open(segment.location, os.O_RDONLY), os.pipe()
    assert os.splice(source, giver, 8192, offset_src=0) > 0
    segment.seal()
    assert torch.equal(read(segment).view(torch.float32), torch.arange(4096.0))
    for fd in (source, taker, giver):
        os.close(fd)
    segment.close()


def test_readers_do_not_disturb_each_other(segment: Segment) -> None:
    first, second = read(segment), read(segment)
    first.zero_()
    assert second.any()
    assert torch.equal(read(segment), second)


def test_closing_frees_it_and_leaves_it_to_who_has_it(segment: Segment) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = read(segment)
    told = segment.location, segment.num_bytes, segment.fingerprint
    segment.close()
    segment.close()
    with pytest.raises(SegmentUnavailable, match=r"^is gone: /proc/\d+/fd/\d+ cannot be opened"):
        map_segment(*told)
    assert torch.equal(held[:20].view(torch.float32), torch.arange(5.0))
    del held
    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.mark.parametrize(
    ("other", "message"),
    [(torch.arange(4.0), "is gone: .* has 16 bytes, and 20 were announced"), (torch.ones(5), "is damaged: the finger")],
)
def test_a_descriptor_that_became_another_file_is_not_taken_for_it(other: torch.Tensor, message: str) -> None:
    old = sealed(torch.arange(5.0))
    told = old.location, old.num_bytes, old.fingerprint
    old.close()
    new = sealed(other)
    assert new.location == told[0]
    with pytest.raises(SegmentUnavailable, match=message):
        map_segment(*told)
    new.close()


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_changed_bit_shows(content: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    segments = [sealed(torch.frombuffer(bytearray(data), dtype=torch.uint8)) for data in (content, changed)]
    with pytest.raises(SegmentUnavailable, match="damaged"):
        map_segment(segments[1].location, len(content), segments[0].fingerprint)
    for segment in segments:
        segment.close()


def test_it_dies_with_its_owner_however_that_ends() -> None:
    program = (
        "import sys, msgspec, torch, signal\n"
        "from tests.fabric.test_segment import sealed\n"
        "segment = sealed(torch.arange(4.0))\n"
        "told = segment.location, segment.num_bytes, segment.fingerprint\n"
        "sys.stdout.buffer.write(msgspec.json.encode(told) + b'\\n'); sys.stdout.flush()\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        told = msgspec.json.decode(process.stdout.readline(), type=tuple[str, int, int])
        held = map_segment(*told)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert torch.equal(held.view(torch.float32), torch.arange(4.0))
        with pytest.raises(SegmentUnavailable, match="is gone"):
            map_segment(*told)
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
