"""Windows: tensors like any other, which another process can map, and which leave nothing behind."""

import os

import pytest
import torch

from ductile.fabric import window
from ductile.fabric.process import Process
from ductile.fabric.window import Window
from tests.ranks import run_alone

SIZES = {"a": (torch.float32, 1000), "none": (torch.float32, 0), "b": (torch.bfloat16, 3), "c": (torch.int64, 1 << 18)}


def left() -> tuple[int, int, int]:
    """What this process still has: windows, files, and stretches of its address space that show a window."""
    with open("/proc/self/maps") as maps:
        mapped = sum("ductile-window" in line for line in maps)
    return len(window.windows()), len(os.listdir("/proc/self/fd")), mapped


def live_and_die() -> tuple[object, ...]:
    before = left()
    buffers = window.allocate(SIZES)
    alike = all(torch.equal(buffers[name], torch.zeros(n, dtype=dtype)) for name, (dtype, n) in SIZES.items())
    aligned = all(buffer.data_ptr() % window.ALIGNMENT_BYTES == 0 for name, buffer in buffers.items() if name != "none")
    (only,) = window.windows()
    places = [window.place(buffers[name].data_ptr()) for name in ("a", "b", "c")]
    content = only.map(Process.own())
    for (key, begin), name in zip(places, ("a", "b", "c"), strict=True):
        buffers[name].fill_(7)
        item = buffers[name].view(torch.uint8).numpy().tobytes()
        assert (key, content[begin : begin + len(item)]) == (only.key, item)
    content.close()
    elsewhere = window.place(torch.zeros(8).data_ptr())
    part = buffers["b"][1:]
    buffers.clear()
    kept = len(window.windows())
    del part
    gone = left() == before
    with pytest.raises(OSError, match=r"No such file|Stale"):
        only.map(Process.own())
    return alike, aligned, elsewhere, kept, gone


def test_tensors_like_any_other_until_the_last_one_goes() -> None:
    assert run_alone(live_and_die) == (True, True, (0, 0), 1, True)


def test_nothing_to_allocate() -> None:
    assert window.allocate({}) == {}
    assert window.allocate({"none": (torch.float32, 0)})["none"].shape == (0,)


def replaced() -> bool:
    """The descriptor's number serves another window by now."""
    buffers = window.allocate({"a": (torch.float32, 1000)})
    (old,) = window.windows()
    buffers.clear()
    buffers = window.allocate({"a": (torch.float32, 1000)})
    (new,) = window.windows()
    with pytest.raises(OSError, match="Stale"):
        Window(old.key, new.fd, new.address, new.num_bytes).map(Process.own())
    return old.fd == new.fd and old.key != new.key


def test_no_other_window_is_taken_for_one_that_is_gone() -> None:
    assert run_alone(replaced)
