"""Which style of context parallelism is meant by "auto"."""

from typing import Literal

from ductile.core.layout.context_parallel import CpStyle, style_violations
from ductile.core.layout.spec import ModelSpec


def chosen_style(asked: CpStyle | Literal["auto"], spec: ModelSpec | None, tp: int, cp: int) -> tuple[CpStyle, str]:
    """The style, and why: "auto" is ulysses where the model can have it. Slots and the planner ask here, so they agree
    on every layout."""
    if asked != "auto":
        return asked, "as asked"
    if spec is not None and cp > 1 and (found := style_violations("ulysses", spec.num_heads, cp, tp)):
        why = found[0].removeprefix('cp_style "ulysses" ').partition(": write")[0]
        return "ring", f"ulysses {why}"
    return "ulysses", "it leaves shared prompts shared"
