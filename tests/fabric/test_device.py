import torch

from ductile.fabric import device
from ductile.fabric.device import name_of, peak_memory, peak_of


def test_a_cpu_is_measured_once_and_only_when_asked(monkeypatch):
    monkeypatch.setattr(device, "_measured", {})
    monkeypatch.setitem(device.SIZES, "cpu", 64)
    monkeypatch.setattr(device, "MEASURE_S", 0.0)
    assert peak_of("cpu", "float32") is None
    precision = torch.get_float32_matmul_precision()
    peak = peak_of("cpu", "float32", measure=True)
    assert peak is not None
    assert peak.source == "measured"
    assert peak.flops_per_s > 1e6
    assert peak_of("cpu", "float32") is peak
    assert peak_of("cpu", "float32", measure=True) is peak
    assert peak_of("cpu", "bfloat16") is None, "another arithmetic is another figure"
    assert torch.get_float32_matmul_precision() == precision


def test_memory_of_a_process_is_what_it_had_at_most():
    before = peak_memory("cpu")
    block = torch.ones(64 << 18)  # 64 MiB
    with_block = peak_memory("cpu")
    del block
    after = peak_memory("cpu")
    assert before.reserved_bytes is None
    assert with_block.used_bytes >= 64 << 20
    assert after.used_bytes > with_block.used_bytes - (32 << 20), "what was freed still counts"
    assert name_of("cpu") == "cpu"
