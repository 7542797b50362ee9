"""Keys that several sub-trees share: written once, they go wherever they are needed.

A table, applied in one pass over the given values. A target that is absent takes the shared value, and one that an
earlier source gave is replaced, as a later source always replaces: so `--seed 7` reaches all seeds that a resolved
config spells out, and `--max-steps None` takes them back. A target that was given as late as the shared key, or later,
is more exact, and keeps its own. No rule reads what another one wrote, so their order means nothing (a test shuffles
it).

`must_agree`: where two different values of one source would be a contradiction, giving both is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ductile.config.reading.errors import Problem, about, dotted, flag, show
from ductile.config.reading.provenance import Draft, Origin, Path, as_table
from ductile.config.schema.run import RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section


@dataclass(frozen=True, slots=True)
class Shared:
    key: str
    targets: tuple[str, ...]
    must_agree: bool = True
    why: str = ""
    """Why the targets may differ, where they may; else what makes the two contradict each other."""
    means: Mapping[bool, object] | None = None
    """Values of the targets where the key is true or false; one of them that is not named says nothing of the targets.
    None: they get the key's own value."""


_RESUME = (
    # -1 is the latest complete checkpoint. `--no-resume` over a file with a step to resume from begins anew.
    Shared(
        "resume",
        ("ckpt.resume_step",),
        must_agree=False,
        why="a given step is more exact than `resume`",
        means={True: -1, False: None},
    ),
    # `--resume` over a file with `clean = true` goes on.
    Shared("resume", ("clean",), why="it deletes what is to be resumed", means={True: False}),
)

_RAY = Shared("ray.num_nodes", ("cluster.num_nodes",), why="they are the nodes of the run")

SHARED: dict[type[Section], tuple[Shared, ...]] = {
    RLConfig: (
        Shared("model.name", ("trainer.model.name", "inference.model.name")),
        Shared("model.chat_template", ("inference.model.chat_template",)),
        Shared("model.chat_template_kwargs", ("inference.model.chat_template_kwargs",)),
        Shared(
            "trainer.model.lora",
            ("inference.model.lora",),
            why="the generators have the adapters that are trained",
        ),
        Shared("max_steps", ("trainer.max_steps", "orchestrator.max_steps")),
        Shared(
            "seq_len",
            ("trainer.model.seq_len", "inference.model.max_model_len"),
            must_agree=False,
            why="a trainer may pack more tokens into a micro-batch than one completion has",
        ),
        Shared(
            "seed",
            ("trainer.seed", "orchestrator.seed", "inference.seed"),
            must_agree=False,
            why="the parts may be seeded apart",
        ),
        *(
            Shared(
                f"orchestrator.sampling.{limit}",
                (f"orchestrator.eval.sampling.{limit}",),
                must_agree=False,
                why="evaluation may have limits of its own",
            )
            for limit in ("max_tokens", "stop", "stop_token_ids", "skip_special_tokens", "include_stop_str_in_output")
        ),
        *_RESUME,
        _RAY,
    ),
    SFTConfig: (
        Shared(
            "data.seq_len",
            ("model.seq_len",),
            must_agree=False,
            why="a trainer may pack more tokens into a micro-batch than one document has",
        ),
        *_RESUME,
        _RAY,
    ),
    TrainerRunConfig: (_RAY,),
}


@dataclass(slots=True)
class Sharing:
    draft: Draft
    filled: dict[Path, Path] = field(default_factory=dict[Path, Path])
    """Target to the shared key that filled it: a problem with the one is a problem with the other."""
    replaced: dict[Path, tuple[object, Origin]] = field(default_factory=dict[Path, tuple[object, Origin]])
    """Targets whose value of an earlier source gave way, with that value."""
    problems: list[Problem] = field(default_factory=list[Problem])


def share(root: type[Section], draft: Draft, rules: Sequence[Shared] | None = None) -> Sharing:
    """The draft with every absent or earlier target filled, and one problem for each contradiction."""
    result = Sharing(draft.copy())
    for shared in SHARED.get(root, ()) if rules is None else rules:
        source: Path = tuple(shared.key.split("."))
        value = draft.get(source)
        if not draft.has(source) or (shared.means is not None and _truth(value) not in shared.means):
            continue
        if shared.means is not None:
            value = shared.means[_truth(value)]
        for key in shared.targets:
            target: Path = tuple(key.split("."))
            if _blocked(draft, target):
                continue
            given, unsaid = draft.has(target), value in (None, "None")
            differs = given and str(draft.get(target)) != str(value)
            later = draft.latest(source).layer > draft.latest(target).layer
            if given and later and unsaid:
                result.replaced[target] = draft.get(target), draft.latest(target)
                result.draft.drop(target)
            elif unsaid:
                continue
            elif not given or (differs and later):
                if given:
                    result.replaced[target] = draft.get(target), draft.latest(target)
                result.draft.drop(target)  # a table would merge
                result.draft.put(target, value, draft.latest(source))
                result.filled[target] = source
            elif differs and shared.must_agree:
                result.problems.append(_conflict(draft, source, target, shared.why))
    return result


def follows(root: type[Section], values: Draft) -> list[Path]:
    """The targets that have what their shared key has: they are filled again when that alone is read."""
    pairs = [
        (shared.key, target) for shared in SHARED.get(root, ()) if shared.means is None for target in shared.targets
    ]
    return [
        tuple(target.split("."))
        for key, target in pairs
        if values.get(tuple(key.split("."))) not in (None, "None")
        and values.get(tuple(key.split("."))) == values.get(tuple(target.split(".")))
    ]


def _truth(value: object) -> bool:
    return value in (True, "true")


def _blocked(draft: Draft, target: Path) -> bool:
    """Return whether something other than a table stands where the target's table should be."""
    above = [target[:length] for length in range(1, len(target)) if draft.has(target[:length])]
    return any(as_table(draft.get(path)) is None for path in above)


def _conflict(draft: Draft, source: Path, target: Path, why: str) -> Problem:
    other = f"contradicts {dotted(target)} = {show(draft.get(target))} ({draft.latest(target)})"
    way_out = f", which takes this value when it is absent. Leave {flag(target)} out, or make the two equal"
    what = f"{other}: {why}" if why else other + way_out
    return about(source, draft.get(source), draft.latest(source), what)
