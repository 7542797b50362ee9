import io
import json

from rich.console import Console

from ductile.loop.bench import GIB, Bench


def test_the_first_step_is_left_out(tmp_path):
    peak = iter([1 * GIB, 2 * GIB, 3 * GIB])
    bench = Bench(lambda: next(peak))
    for step, step_s in ((0, 9.0), (1, 100.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        bench.on_metrics(step, {"tokens": 1000.0, "step_s": step_s})
    figures = bench.figures()
    assert figures["throughput"] == {
        "mean": (1000 + 500 + 250) / 3,
        "std": figures["throughput"]["std"],
        "min": 250,
        "max": 1000,
    }
    assert figures["step_time"]["min"] == 1
    assert figures["peak_memory"] == {"gib": 3.0}
    assert figures["mfu"] is None
    bench.write(tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text())["steps"] == 3
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(bench.table())
    text = console.export_text()
    assert "Step" in text
    assert "MFU" in text
    assert "Peak Memory" in text
    assert "583 ± 312 tokens/s [250, 1,000]" in text


def test_a_run_that_was_too_short_has_an_empty_table():
    assert Bench(lambda: 0.0).figures()["steps"] == 0
    assert Bench(lambda: 0.0).table().row_count == 0
