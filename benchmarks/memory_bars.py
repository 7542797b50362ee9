"""The bars of `memory.py`: which of them its figures miss, a sentence each."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

MOST_OFF = 0.10
"""Share by which a predicted peak may be off."""
MOST_BELOW = 0.05
"""Share by which it may be below what is measured."""
LEAST_PREDICTIONS = 20
LEAST_LOGITS_RATIO = 8.0
LEAST_LAYOUTS = 12
MOST_OVER_BEST = 1.15
"""Times the best measured step that the step of the predicted best layout may take."""
OFFLOADING = "ac_offloading"
"""Name of the knob whose rows have a number of activations in flight."""

Figures = Mapping[str, Any]


def missed(figures: Figures) -> list[str]:
    return [
        *_by_rows(figures["rows"]),
        *_by_offloading([row for row in figures["rows"] if row.get("asked_in_flight")]),
        *_by_logits(figures["logits_ratio"]),
        *_by_predictions(figures["predictions"]),
        *_by_fit(figures["fit"]),
    ]


def _by_rows(rows: Sequence[Figures]) -> Iterator[str]:
    for row in rows:
        if not (row["is_as_promised"] or row["why_not"]):
            yield f"{row['knob']} saves {row['saved']:.0%}: that is not what the page says, and the row has no reason"
        yield from _by_prediction(row["knob"], row["predicted_peak_bytes"], row["peak_bytes"])


def _by_offloading(rows: Sequence[Figures]) -> Iterator[str]:
    """Each group of rows that differ in the number alone has to show it."""
    for row in rows:
        if row["most_in_flight"] != row["asked_in_flight"]:
            yield f"{row['knob']}: {row['most_in_flight']} activations were in flight"
    of_baseline: dict[str, list[Figures]] = {}
    for row in sorted(rows, key=lambda row: row["asked_in_flight"]):
        of_baseline.setdefault(row["baseline"], []).append(row)
    for group in of_baseline.values():
        for fewer, more in pairwise(group):
            if fewer["peak_bytes"] >= more["peak_bytes"]:
                yield f"{more['knob']} has no higher peak than {fewer['knob']}"


def _by_logits(ratio: float) -> Iterator[str]:
    if ratio < LEAST_LOGITS_RATIO:
        yield f"logit memory falls {ratio:.1f} times, and not {LEAST_LOGITS_RATIO:g}"


def _by_predictions(predictions: Sequence[Figures]) -> Iterator[str]:
    if len(predictions) < LEAST_PREDICTIONS:
        yield f"there are {len(predictions)} predictions, and not {LEAST_PREDICTIONS}"
    for each in predictions:
        yield from _by_prediction(each["case"], each["predicted_peak_bytes"], each["peak_bytes"])
        host = each["predicted_host_bytes"], each["host_peak_bytes"]
        yield from _by_prediction(f"{each['case']}, in host memory,", *host)


def _by_prediction(name: str, predicted: int, found: int) -> Iterator[str]:
    if not (1 - MOST_BELOW) * found <= predicted <= (1 + MOST_OFF) * found:
        off = predicted / found - 1
        yield f"{name} is predicted {abs(off):.0%} too {'low' if off < 0 else 'high'}"


def _by_fit(fit: Figures) -> Iterator[str]:
    if len(fit["layouts"]) < LEAST_LAYOUTS:
        yield f"fit has {len(fit['layouts'])} layouts, and not {LEAST_LAYOUTS}"
    if fit["ratio"] is None:
        yield "fit has no prediction"
    elif fit["ratio"] > MOST_OVER_BEST:
        yield f"the layout that fit expects to be the fastest takes {fit['ratio']:.2f} times the fastest one's step"
