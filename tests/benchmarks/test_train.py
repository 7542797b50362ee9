"""The benchmark of the training step: what it makes of times, and a small one of real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import train
from budget import CannotGoOn
from train import APART, ONE, PEERS, Timed, figures_of, make_samples, same_losses

TIMES = {ONE: [4.0, 5.0, 6.0], "ductile": [2.0, 2.5, 9.0], "tp 2": [3.0, 3.0, 3.0]}
"""Seconds, of the wall and of the CPU."""


def timed(seconds: list[float], loss: float = 1.0) -> list[Timed]:
    return [Timed(each_s, each_s, loss) for each_s in seconds]


def test_the_ratio_is_against_the_fastest_peer_and_axes_are_against_one_slot() -> None:
    theirs = dict(zip(PEERS, ([5.0], [4.0], [3.0], [8.0]), strict=True))
    found = figures_of({name: timed(seconds) for name, seconds in (TIMES | theirs).items()}, num_tokens=100)
    assert found["best_peer"] == "transformers"
    assert found["ratio_vs_best_peer"] == 3.0 / 2.5
    assert found["tokens_per_s"]["ductile"] == 40.0
    assert found["cpu_vs_one_slot"] == {ONE: 1.0, "ductile": 0.5, "tp 2": 0.6}


def test_without_a_peer_there_is_no_ratio() -> None:
    assert "ratio_vs_best_peer" not in figures_of({name: timed(seconds) for name, seconds in TIMES.items()}, 100)


def test_who_computes_something_else_is_told() -> None:
    expected = timed([1.0, 1.0], loss=2.0)
    same_losses("tp 2", timed([1.0, 1.0], loss=2.0009), expected)
    same_losses(APART, timed([1.0, 1.0], loss=3.0), expected)
    with pytest.raises(CannotGoOn, match="tp 2 and 1 slot have other losses"):
        same_losses("tp 2", timed([1.0, 1.0], loss=2.0011), expected)


def test_samples_share_nothing_and_are_trained_but_for_the_first_token() -> None:
    samples = make_samples(8, 16, vocab_size=32)
    assert len({sample.token_ids[0] for sample in samples}) == 8
    assert {(len(sample), sample.num_trained) for sample in samples} == {(17, 16)}


@pytest.mark.nightly
def test_a_small_one_of_real_processes(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    arguments = ["--small", "--rounds", "1", "--steps", "1", "--tokens", "8", "--only", "ductile", "plain"]
    command = [sys.executable, str(Path(train.__file__)), *arguments, "--json", str(file)]
    subprocess.run(command, check=True, timeout=110, capture_output=True)
    found = json.loads(file.read_text())
    assert found["cpu_s_per_token"].keys() == {ONE, "ductile", "plain"}
    assert found["settings"] == {"rounds": 1, "steps": 1, "samples": 8, "tokens": 8}
