"""What is too far from one device fails, in whichever column."""

from dataclasses import replace

import numpy as np
import pytest

from tests.parity.measured import BOUNDS, Measured, differences
from tests.parity.recorded import Recorded
from tests.parity.rows import Row, header, judged, summary

NAN = float("nan")
REFERENCE = Measured(
    losses=(1.0, 2.0),
    grad_norms=(3.0, 4.0),
    num_tokens=(2, 2),
    tokens={-0.5: [Recorded(-1.0, 2.0)], -0.25: [Recorded(-3.0, 1.0)]},
    gradient={"gradient/a": np.array([1.0, -8.0]), "gradient/b": np.array([0.01])},
    before={"model/a": np.array([1.0, 1.0])},
    after={"model/a": np.array([1.003, 0.996])},
)


def tokens(*recorded: Recorded) -> Measured:
    """The first token as several slots have it."""
    return replace(REFERENCE, tokens=REFERENCE.tokens | {-0.5: recorded})


def gradient(**values: list[float]) -> Measured:
    arrays = {f"gradient/{name}": np.array(each) for name, each in values.items()}
    return replace(REFERENCE, gradient={**REFERENCE.gradient, **arrays})


def failing(measured: Measured) -> list[str]:
    values = differences(measured, REFERENCE)
    return [column for column, bound in BOUNDS.items() if not values[column] <= bound]


@pytest.mark.parametrize(
    ("near", "far", "column"),
    [
        (replace(REFERENCE, losses=(1.00009, 2.0)), replace(REFERENCE, losses=(1.0, 2.00011)), "loss"),
        (replace(REFERENCE, grad_norms=(3.0, 4.0003)), replace(REFERENCE, grad_norms=(3.0004, 4.0)), "grad_norm"),
        (tokens(Recorded(-1.00009, 2.0)), tokens(Recorded(-1.0, 2.0), Recorded(-1.00011, 2.0)), "logprob"),
        (tokens(Recorded(-1.0, 2.00009)), tokens(Recorded(-1.0, 2.00011), Recorded(-1.0, 2.0)), "entropy"),
        (gradient(a=[1.0007, -8.0]), gradient(a=[1.0009, -8.0]), "gradient"),
        (gradient(b=[0.0100009]), gradient(b=[0.0100011]), "gradient"),
        (
            replace(REFERENCE, after={"model/a": np.array([1.003, 0.996004])}),
            replace(REFERENCE, after={"model/a": np.array([1.003, 0.996006])}),
            "update",
        ),
        (REFERENCE, replace(REFERENCE, losses=(NAN, 2.0)), "loss"),
        (REFERENCE, tokens(Recorded(-1.0, 2.0), Recorded(NAN, 2.0)), "logprob"),
        (REFERENCE, gradient(a=[NAN, -8.0]), "gradient"),
    ],
)
def test_a_bound_holds(near: Measured, far: Measured, column: str) -> None:
    assert failing(near) == []
    assert failing(far) == [column]


def test_rows() -> None:
    bounds = {"changed": 0.0, "loss": 1e-5}
    good = judged("tp=2", "llama", {"changed": 0, "loss": 2e-6, "moved_kib": 12}, bounds, 1.25)
    bad = judged("tp=2 -> pp=2", "qwen3", {"changed": 3, "loss": NAN, "moved_kib": 12}, bounds, 1.25)
    nothing = Row("cp=2", "qwen3", "FAIL", {}, "SlotGone: slot 3 ended with -9", 2.5)
    assert (good.verdict, bad.verdict) == ("PASS", "FAIL")
    assert [header(good.values, 12), *(row.line(12) for row in (good, bad, nothing))] == [
        "                            changed      loss moved_kib     s",
        "PASS  llama  tp=2                 0   2.0e-06        12   1.2",
        "FAIL  qwen3  tp=2 -> pp=2         3       nan        12   1.2  changed is above 0; loss is above 1e-05",
        "FAIL  qwen3  cp=2           2.5  SlotGone: slot 3 ended with -9",
    ]
    assert summary([good, good, bad, nothing]) == "4 rows: 2 PASS, 2 FAIL"
