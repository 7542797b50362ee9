"""What a config says of the scorers that cannot be, or that is good to know: how many slots hold one together."""

from collections.abc import Iterator

from ductile.config.checks.on_disk import read_spec
from ductile.config.finding import Finding
from ductile.config.schema.run import RLConfig
from ductile.core.instances.placement import Placement, many
from ductile.core.layout.choice.tp_sizes import even_tp_sizes, tp_notes, why_not_tp


def scorer_findings(config: RLConfig, placement: Placement) -> Iterator[Finding]:
    """Sizes of `scorer.tp` that the score slots, or the model, cannot have."""
    tp, num_slots, spec = config.scorer.tp, len(placement.score), read_spec(config.trainer.model.name)
    possible = [size for size in range(1, num_slots + 1) if num_slots % size == 0]
    if spec is not None:
        possible = [size for size in possible if size in even_tp_sizes(spec)]
    instead = f"write {' or '.join(map(str, possible))}"
    if num_slots % tp:
        what = f"must divide the number of score slots, {num_slots}: {instead}"
        yield Finding(("scorer.tp", "cluster.component_placement"), what)
    elif num_slots and spec is not None and (reasons := why_not_tp(spec, tp)):
        yield Finding(("scorer.tp",), f"{' and '.join(reasons)}: {instead}")


def scorer_warnings(config: RLConfig, placement: Placement) -> Iterator[str]:
    """What is accepted, and good to know."""
    tp, spec = config.scorer.tp, read_spec(config.trainer.model.name)
    if tp > 1 and not placement.score:
        yield f"scorer.tp = {tp} has no effect here: no slot scores (cluster.component_placement)"
    elif tp > 1 and spec is not None:
        yield from (f"scorer.tp = {tp} {note}" for note in tp_notes(spec, tp))


def scorers_in_words(config: RLConfig, placement: Placement) -> str:
    """ "2 on 2 slots each"; "" where each is on one slot, or there is none."""
    tp, num_slots = config.scorer.tp, len(placement.score)
    return f"{many(num_slots // tp, 'scorer')} on {tp} slots each" if tp > 1 and num_slots else ""
