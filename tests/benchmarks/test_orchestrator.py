"""A small step of the orchestrator's benchmark, with real slots and sockets."""

import json
import subprocess
import sys
from pathlib import Path

import orchestrator

BENCHMARK = Path(orchestrator.__file__)


def test_a_small_step_stays_below_sixteen_bytes_a_token(tmp_path: Path) -> None:
    file = tmp_path / "orchestrator.json"
    file.write_text(json.dumps({"cpu_s_per_mtoken": 9.0, "cpu_s_per_mtoken_before": 7.0, "commit_before": "abc"}))
    command = [sys.executable, str(BENCHMARK), "--completions", "32", "--tokens", "32768", "--json", str(file)]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    found = json.loads(file.read_text())
    assert (found["completions"], found["tokens_per_completion"]) == (32, 32768)
    assert 7 < found["generated_bytes_per_token"] < 7.2
    assert 7 < found["trained_bytes_per_token"] < 7.5
    assert found["bytes_per_token"] < 16
    columns_or_lists = "columns take 0.07 to 0.3, by machine and load; lists of numbers took 0.56 to 1.24"
    assert 0 < found["cpu_s_per_mtoken"] < 0.5, columns_or_lists
    assert (found["cpu_s_per_mtoken_before"], found["commit_before"]) == (7.0, "abc"), "what it has compared with stays"
    assert found["times_less_cpu"] == 7.0 / found["cpu_s_per_mtoken"]
