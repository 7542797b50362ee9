"""Which slot along cp runs which tokens of a micro-batch, and which of the two styles a model can have.

    ulysses   Tokens are dealt out like cards: no slot has many more of them to score than another. For attention each
              slot has all tokens and its part of the heads. Documents that begin alike share their beginning.
    ring      Each document is cut into 2 cp chunks. A slot has one counted from the front and one counted from the
              back: all slots have equally much causal attention. Keys and values travel from slot to slot, all heads
              of them. Documents share nothing.

    4 tokens, cp 2    ulysses: slot 0 has 0 2, slot 1 has 1 3     ring: slot 0 has 0 3, slot 1 has 1 2

`seq_len` counts the tokens of all slots along cp together, and need not be a multiple of anything: a micro-batch is
filled up (`num_laid_out`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Literal

from ductile.core.layout.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np

CpStyle = Literal["ring", "ulysses"]
CpStyleAsked = CpStyle | Literal["auto"]


@dataclass(frozen=True, slots=True)
class StyleViolation:
    """What keeps a model from a style."""

    style: CpStyle
    what: str
    """The sentence goes on after the style."""
    instead: str
    """What to write."""

    @property
    def sentence(self) -> str:
        return f'cp_style "{self.style}" {self.what}: {self.instead}'


def chosen_style(asked: CpStyleAsked, spec: ModelSpec | None, tp: int, cp: int) -> tuple[CpStyle, str]:
    """The style, and why: "auto" is ulysses where the model can have it. Slots and the planner ask here, so they agree
    on every layout."""
    if asked != "auto":
        return asked, "as asked"
    if spec is not None and (violation := style_violation("ulysses", spec.num_heads, cp, tp)):
        return "ring", f"ulysses {violation.what}"
    return "ulysses", "it leaves shared prompts shared"


def style_violation(style: CpStyle, num_heads: int, cp: int, tp: int = 1) -> StyleViolation | None:
    """What keeps a model of so many query heads from the style on such a layout; None where it can have it. Key heads
    keep none from it, nor does anything keep one from ring."""
    chunk = -(-num_heads // tp)
    sizes = sorted({min(chunk, num_heads - start) for start in range(0, num_heads, chunk)})
    fitting = [size for size in range(1, sizes[0] + 1) if all(heads % size == 0 for heads in sizes)]
    if style == "ring" or cp in fitting:
        return None
    uneven = next(heads for heads in sizes if heads % cp)
    each = f"the {uneven} query heads of a slot of tp {tp}" if tp > 1 else f"the model's {num_heads} query heads"
    return StyleViolation(
        style,
        f"deals {each} out to the slots along cp, and cp is {cp}",
        f'write cp_style = "ring", or a cp of {_any_of(fitting)}',
    )


def document_multiple(style: CpStyle, cp: int) -> int:
    """What the number of tokens of each document must be a multiple of."""
    return 2 * cp if style == "ring" and cp > 1 else 1


def token_multiple(style: CpStyle, cp: int, tp: int = 1) -> int:
    """What the number of tokens of a micro-batch must be a multiple of: each slot along cp has equally many, in as many
    equal parts as there are slots along tp."""
    return lcm(document_multiple(style, cp), cp * tp)


def num_laid_out(style: CpStyle, documents: Sequence[int], cp: int, tp: int = 1) -> int:
    """Tokens that all slots along cp together run for documents of these lengths, those that only fill up among them.

    documents: with ulysses a beginning that is shared counts once, with ring as often as it is shared.

        num_laid_out("ulysses", [5, 1], 2)    6
        num_laid_out("ring", [5, 1], 2)       8 + 4
    """
    each, all_together = document_multiple(style, cp), token_multiple(style, cp, tp)
    num_tokens = sum(_round_up(length, each) for length in documents)
    return max(all_together, _round_up(num_tokens, all_together))


def tokens_of_slots(style: CpStyle, documents: Sequence[int], cp: int) -> "np.ndarray":
    """[cp, T / cp] int64: the tokens of each slot, in the order in which it runs them. T, the sum of the lengths of the
    documents, is a multiple of `token_multiple`; with ring each length is one of `document_multiple`.

    With ring the first half of a slot's tokens are its front chunks of all documents, the second half its back chunks.
    """
    import numpy as np  # help and a config's mistakes are told without it

    if style == "ulysses":
        return np.arange(sum(documents)).reshape(-1, cp).T
    ends = accumulate(documents)
    # Row i has chunk i of every document.
    chunks = [np.arange(end - length, end).reshape(2 * cp, -1) for length, end in zip(documents, ends, strict=True)]
    rows = np.concatenate(chunks, axis=1)
    return np.concatenate((rows[:cp], rows[: cp - 1 : -1]), axis=1)


def _any_of(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
