import torch

from ductile.core.layout.model.peak import Peak
from ductile.kernels import device
from ductile.kernels.device import name_of, peak_memory, peak_of


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


def test_what_measuring_took_of_a_gpu_is_given_back_and_no_peak_of_the_run(monkeypatch):
    did, found = [], iter([torch.OutOfMemoryError("of 128 MiB"), 1e12])

    def fastest(at, arithmetic):
        did.append("measure")
        outcome = next(found)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(device, "_measured", {})
    monkeypatch.setattr(device, "name_of", lambda at: "an unknown GPU")
    monkeypatch.setattr(device, "_fastest", fastest)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("give back"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda at: did.append(f"forget {at}"))
    assert peak_of("cuda:1", "bfloat16", measure=True) is None, "there was no room: the run goes on without"
    assert peak_of("cuda:1", "bfloat16", measure=True) == Peak(1e12, "measured")
    assert did == ["measure", "give back", "forget cuda:1"] * 2
