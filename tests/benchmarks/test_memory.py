"""The benchmark of memory: what it tries, which bars it says are missed, and one case that is really measured."""

from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import pytest

import memory
from budget import Budget
from memory_bars import MOST_BELOW, MOST_OFF, missed
from memory_cases import MODELS, Case, all_cases, knobs, layouts

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "ac": {"mode": "full"},
        "ac_offloading": {"max_inflight_activations": 2},
        "fsdp_cpu_offload": True,
        "fused_lm_head_token_chunk_size": 32,
    },
}
"""Of the cases that are measured here."""


def row(knob: str, peak: int, **others: Any) -> dict[str, Any]:
    plain = {"is_as_promised": True, "why_not": "", "saved": 0.5, "baseline": "plain"}
    return {"knob": knob, "peak_bytes": peak, "predicted_peak_bytes": peak, **plain, **others}


def in_flight(number: int, peak: int) -> dict[str, Any]:
    return row(f"ac_offloading {number}", peak, asked_in_flight=number, most_in_flight=number)


GOOD: dict[str, Any] = {
    "rows": [row("ac full", 100), in_flight(1, 100), in_flight(2, 110), in_flight(5, 140)],
    "logits_ratio": 8.0,
    "predictions": [
        {
            "case": f"case {n}",
            "peak_bytes": 1000,
            "predicted_peak_bytes": 950 + 7 * n,
            "host_peak_bytes": 100 * (n % 2),
            "predicted_host_bytes": 101 * (n % 2),
        }
        for n in range(20)
    ],
    "fit": {"layouts": [{}] * 12, "ratio": 1.15},
}

BROKEN: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "a knob saves too little": (("rows", 0, "is_as_promised"), False, "ac full saves 50%: that is not what the page"),
    "too many in flight": (("rows", 1, "most_in_flight"), 3, "ac_offloading 1: 3 activations were in flight"),
    "none in flight": (("rows", 1, "most_in_flight"), None, "ac_offloading 1: None activations were in flight"),
    "the number does not show": (("rows", 3), in_flight(5, 110), "ac_offloading 5 has no higher peak than ac_off"),
    "a row that is predicted badly": (("rows", 0, "predicted_peak_bytes"), 111, "ac full is predicted 11% too high"),
    "logits": (("logits_ratio",), 7.9, "logit memory falls 7.9 times, and not 8"),
    "too low": (("predictions", 3, "predicted_peak_bytes"), 940, "case 3 is predicted 6% too low"),
    "too high": (("predictions", 3, "predicted_peak_bytes"), 1110, "case 3 is predicted 11% too high"),
    "too little on the host": (
        ("predictions", 3, "predicted_host_bytes"),
        90,
        "case 3, in host memory, is predicted 10% too low",
    ),
    "too few": (("predictions",), GOOD["predictions"][:19], "there are 19 predictions, and not 20"),
    "too few layouts": (("fit", "layouts"), [{}] * 11, "fit has 11 layouts, and not 12"),
    "a slow layout": (("fit", "ratio"), 1.2, "the layout that fit expects to be the fastest takes 1.20 times"),
    "no fit": (("fit", "ratio"), None, "fit has no prediction"),
}
"""By what is wrong: where in the figures, what stands there, and what is said."""


def test_good_figures_miss_nothing() -> None:
    assert missed(GOOD) == []


@pytest.mark.parametrize("what", BROKEN)
def test_every_bar_is_told_when_it_is_missed(what: str) -> None:
    place, value, said = BROKEN[what]
    figures = deepcopy(GOOD)
    inside = figures
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    assert [each[: len(said)] for each in missed(figures)] == [said]


def test_a_knob_that_saves_too_little_may_say_why() -> None:
    figures = deepcopy(GOOD)
    figures["rows"][0] |= {"is_as_promised": False, "why_not": "the model is small"}
    assert missed(figures) == []


def test_there_is_enough_to_hold_the_planner_against() -> None:
    cases = [*all_cases(), *layouts()]
    assert len({case.name for case in cases}) == len(cases)
    assert len(cases) >= 20 + 12
    assert {case.model for case in cases} == {*MODELS}
    assert {axis for case in cases for axis in case.sizes} == {"dp_shard", "dp_replicate", "tp", "pp", "cp"}
    assert {case.num_slots for case in all_cases()} == {1, 2, 4}


def test_layouts_run_the_same_step() -> None:
    for case in layouts():
        ranks = case.sizes.get("dp_shard", 1) * case.sizes.get("dp_replicate", 1)
        assert (case.num_slots, case.seq_len * ranks) == (4, 1024)


@pytest.mark.parametrize("case", [*all_cases(), *layouts()], ids=lambda case: case.name)
def test_every_case_is_one_that_a_run_may_have(case: Case, tmp_path) -> None:
    measured = memory.Measured(tmp_path, Budget(), {})
    layout = measured.layout(case)
    assert {axis: size for axis, size in asdict(layout.dims).items() if size > 1} == case.sizes
    assert measured.predicted(case).device.total > 4 * measured.spec(case).num_parameters / case.num_slots
    assert case.seq_len % case.sample_tokens == 0


def test_knobs_differ_from_their_baselines() -> None:
    for knob in knobs():
        assert knob.case.options != knob.baseline.options
        assert (knob.case.model, knob.case.sizes, knob.case.seq_len) == (
            knob.baseline.model,
            knob.baseline.sizes,
            knob.baseline.seq_len,
        )


def test_cases_are_measured_in_real_processes(tmp_path) -> None:
    small = Case("llama", {"dp_shard": 2}, seq_len=512, sample_tokens=128)
    measured = memory.Measured(tmp_path, Budget(100), timed={small.name: 1})
    cases = {knob: replace(small, options=options) for knob, options in OPTIONS.items()}
    found = {knob: measured.of(case) for knob, case in cases.items()}
    state_bytes = 16 * measured.spec(small).num_parameters // 2
    """Weights, gradients and moments of a slot."""
    assert found["plain"].loss == pytest.approx(found["all"].loss, abs=1e-6)
    assert found["plain"].peak_bytes > found["all"].peak_bytes + state_bytes
    assert state_bytes < found["all"].host_peak_bytes < 1.3 * state_bytes
    assert found["plain"].host_peak_bytes == 0
    assert [each.in_flight for each in found.values()] == [None, 2]
    for knob, case in cases.items():
        assert sum(found[knob].peak_parts.values()) == found[knob].peak_bytes
        assert (found[knob].step_s > 0) == (knob == "plain")
        ratio = measured.predicted(case).device.total / found[knob].peak_bytes
        assert 1 - MOST_BELOW <= ratio <= 1 + MOST_OFF, knob
