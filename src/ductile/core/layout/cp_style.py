"""Which style of context parallelism a layout has, and what that asks of it.

`ductile.core.layout.context_parallel` knows the styles. It loads numpy, which a config without cp does not need, so it
is imported where cp is above 1.
"""

from typing import Literal

from ductile.core.layout.spec import ModelSpec

CpStyleAsked = Literal["ring", "ulysses", "auto"]
CpStyleChosen = Literal["ring", "ulysses"]


def chosen_style(asked: CpStyleAsked, spec: ModelSpec | None, tp: int, cp: int) -> tuple[CpStyleChosen, str]:
    """The style, and why: "auto" is ulysses where the model can have it. Slots and the planner ask here, so they agree
    on every layout."""
    if asked != "auto":
        return asked, "as asked"
    if spec is not None and (found := why_not("ulysses", spec, tp, cp)):
        return "ring", f"ulysses {found[0].partition(': write')[0]}"
    return "ulysses", "it leaves shared prompts shared"


def why_not(style: CpStyleChosen, spec: ModelSpec, tp: int, cp: int) -> list[str]:
    """What keeps the model from this style, and what to write instead: sentences that go on after the style. None when
    it can have it."""
    if cp == 1:
        return []
    from ductile.core.layout.context_parallel import style_violations

    return [each.removeprefix(f'cp_style "{style}" ') for each in style_violations(style, spec.num_heads, cp, tp)]


def token_multiple(style: CpStyleChosen, cp: int, tp: int) -> int:
    """What the number of tokens of a micro-batch is filled up to a multiple of."""
    if cp == 1:
        return tp
    from ductile.core.layout import context_parallel

    return context_parallel.token_multiple(style, cp, tp)
