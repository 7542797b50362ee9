"""The trainer's layout as a config asks for it: the rules by which it follows from the number of slots, and all that is
wrong with them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from ductile.config.finding import Finding
from ductile.config.model import TrainerModelConfig
from ductile.config.on_disk import read_spec
from ductile.config.run import RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema import keys
from ductile.config.trainer import ResizeConfig
from ductile.core.layout.asked_layout import AskedLayout
from ductile.core.layout.layout_rules import LayoutRules, choose_layout, plan_listed
from ductile.core.layout.layout_text import LayoutTextError, parse_sizes
from ductile.core.layout.planner import LayoutFinding, plan_layout
from ductile.core.layout.spec import ModelSpec

TrainingConfig = RLConfig | SFTConfig | TrainerRunConfig


def layout_rules(config: TrainingConfig) -> LayoutRules:
    """The rules of a run. A listed layout that is no text of one counts as absent: `layout_findings` refuses it."""
    model, resize, _ = _trainer(config)
    listed = tuple(text for text in resize.layouts if not _unreadable(text))
    return LayoutRules(_spec(model), asked_layout(model), listed, _num_samples(config))


def asked_layout(model: TrainerModelConfig) -> AskedLayout:
    return AskedLayout(
        pp=model.pp,
        dp_replicate=model.dp_replicate,
        cp=model.cp,
        tp=model.tp,
        cp_style=model.cp_style,
        pp_schedule=model.pp_schedule,
        vpp=model.vpp,
        seq_len=model.seq_len,
    )


def layout_findings(config: TrainingConfig, num_slots: int) -> Iterator[Finding]:
    """Everything that keeps the trainer from its layout on so many slots, or from a listed one."""
    rules, (_, resize, root) = layout_rules(config), _trainer(config)
    yield from _listed_findings(rules, resize, root)
    if choose_layout(num_slots, rules).listed:
        return  # the run begins with it
    for error in plan_layout(num_slots, rules.asked, rules.spec, rules.num_samples).errors:
        if not unbuilt({error.keys[0]: error.value}):  # which is told already
            yield Finding(tuple(f"{root}model.{key}" for key in error.keys), error.what)


def layout_warnings(config: TrainingConfig, num_slots: int) -> Iterator[str]:
    """What is accepted, and good to know."""
    rules, (_, _, root) = layout_rules(config), _trainer(config)
    for warning in choose_layout(num_slots, rules).planned.warnings:
        yield _sentence(warning, f"{root}model.")
    for place, listed in enumerate(rules.listed):
        sizes = parse_sizes(listed)
        first = choose_layout(prod(sizes.values()), replace(rules, listed=rules.listed[:place])).listed
        if first and "dp_shard" in sizes:
            yield f"{root}resize.layouts: {listed!r} is never taken, as {first!r} before it fits as many slots"


def unbuilt(sizes: Mapping[str, object]) -> list[str]:
    """A sentence for each axis above 1 that is not built yet."""
    above_one = {axis: size for axis, size in sizes.items() if size != 1 and axis in TrainerModelConfig.model_fields}
    marks = {axis: keys(TrainerModelConfig)[axis].not_built for axis in above_one}
    return [f"{axis} = {above_one[axis]}. {mark.sentence()}" for axis, mark in marks.items() if mark]


def _listed_findings(rules: LayoutRules, resize: ResizeConfig, root: str) -> Iterator[Finding]:
    key = f"{root}resize.layouts"
    for text in resize.layouts:
        if wrong := _unreadable(text):
            yield Finding((key,), f"{text!r}: {wrong}")
            continue
        sizes = parse_sizes(text)
        if refused := unbuilt(sizes):
            yield Finding((key,), f"{text!r} has {' '.join(refused)}")
            continue
        planned = plan_listed(text, prod(sizes.values()), rules)
        for error in planned.errors if planned else ():
            yield Finding((key,), f"{text!r}: {error.sentence}")


def _unreadable(text: str) -> str:
    try:
        parse_sizes(text)
    except LayoutTextError as error:
        return str(error)
    return ""


def _sentence(finding: LayoutFinding, root: str) -> str:
    at = root if finding.keys[0] in TrainerModelConfig.model_fields else ""
    return f"{at}{finding.sentence}"


def _trainer(config: TrainingConfig) -> tuple[TrainerModelConfig, ResizeConfig, str]:
    """The model's section, that of resizes, and what stands before their keys."""
    if isinstance(config, RLConfig):
        return config.trainer.model, config.trainer.resize, "trainer."
    return config.model, config.resize, ""


def _spec(model: TrainerModelConfig) -> ModelSpec | None:
    spec, num_layers = read_spec(model.name), model.debug.num_layers
    return spec if spec is None or num_layers is None else replace(spec, num_layers=min(num_layers, spec.num_layers))


def _num_samples(config: TrainingConfig) -> int | None:
    """Samples of an optimizer step."""
    if isinstance(config, RLConfig):
        return max(1, config.orchestrator.batch_size // config.orchestrator.n_minibatches)
    if isinstance(config, SFTConfig):
        return config.data.batch_size
    return config.data.fake.batch_size if config.data.fake else None
