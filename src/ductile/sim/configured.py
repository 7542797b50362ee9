"""The scenario that a config of `ductile simulate` describes: all of it, or what differs from a recorded run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ductile.config.schema.section import Section
from ductile.config.schema.simulate import LengthsConfig, LognormalLengths, SimulateConfig, SimulatedCluster
from ductile.core.instances.placement import Placement, place
from ductile.core.layout.choice.asked_layout import DATA_PARALLELISM
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.layout.choice.layout_text import LayoutTextError, parse_sizes
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.sim.recording import Recording, recorded_scenario
from ductile.sim.scenario import DrawLength, Scenario, WorkLoad, lognormal, recorded
from ductile.user_files import read_text

LIMITS = ("max_num_seqs", "min_train", "slots_per_scorer")


def configured(config: SimulateConfig, recording: Recording | None = None) -> Scenario:
    """Raises NoRecording, PlacementError, OSError or ValueError when the recording, the placement or the file of
    lengths is no good."""
    scenario = _written(config) if recording is None else _changed(recorded_scenario(recording, config.seed), config)
    size, num_slots = scenario.limits.slots_per_scorer, len(scenario.placement.score)
    if num_slots % size:
        raise ValueError(f"cluster.slots_per_scorer = {size} must divide the number of inference slots, {num_slots}")
    return scenario


def _written(config: SimulateConfig) -> Scenario:
    cluster, work, speeds = config.cluster, config.work, config.speeds
    seq_len = work.seq_len or work.prompt_tokens + work.max_tokens
    placement = place(cluster.component_placement)
    scenario = Scenario(
        placement=placement,
        work=WorkLoad(**_work_fields(work.model_dump() | {"seq_len": seq_len}, work.lengths), seed=config.seed),
        speeds=Speeds(
            decode=DecodeSpeed(speeds.decode_step_s, speeds.decode_per_sequence_s, speeds.decode_per_context_s),
            prefill_tokens_per_s=speeds.prefill_tokens_per_s,
            train=TrainSpeed(speeds.train_tokens_per_s, speeds.train_overhead, speeds.micro_step_s),
            score_tokens_per_s=speeds.score_tokens_per_s,
            optim_s=speeds.optim_s,
            publish_s=speeds.publish_s,
            receive_s=speeds.receive_s,
        ),
        costs=SwitchCosts(**config.costs.model_dump()),
        limits=Limits(**{name: getattr(cluster, name) for name in LIMITS}),
        coalesce_s=cluster.coalesce_s,
        score=bool(placement.score),
        on_gpu=cluster.device == "cuda",
        offloads=cluster.enable_offload,
        rules=LayoutRules(
            asked=replace(DATA_PARALLELISM, seq_len=seq_len),
            listed=_listed(cluster.layouts),
            topology=_topology(cluster, placement),
        ),
    )
    return scenario.at(placement)


def _changed(scenario: Scenario, config: SimulateConfig) -> Scenario:
    """The scenario with what the config says otherwise."""
    cluster, work, speeds = _said(config.cluster), _said(config.work), _said(config.speeds)
    if "device" in cluster:
        scenario = replace(scenario, on_gpu=config.cluster.device == "cuda").at(scenario.placement)
    if "enable_offload" in cluster:
        scenario = replace(scenario, offloads=config.cluster.enable_offload).at(scenario.placement)
    if "component_placement" in cluster:
        scenario = scenario.at(place(config.cluster.component_placement))
        scenario = replace(scenario, score=bool(scenario.placement.score))
    if "layouts" in cluster:
        scenario = replace(scenario, rules=replace(scenario.rules, listed=_listed(cluster["layouts"])))
    if cluster.get("slots_per_node") is not None:
        topology = _topology(config.cluster, scenario.placement)
        scenario = replace(scenario, rules=replace(scenario.rules, topology=topology))
    decode = {name.removeprefix("decode_"): value for name, value in speeds.items() if name.startswith("decode_")}
    train = {name.removeprefix("train_"): value for name, value in speeds.items() if name.startswith("train_")}
    if "micro_step_s" in speeds:
        train["micro_step_s"] = speeds["micro_step_s"]
    others = {name: value for name, value in speeds.items() if name in Speeds.__dataclass_fields__}
    speeds = replace(
        scenario.speeds,
        decode=replace(scenario.speeds.decode, **decode),
        train=replace(scenario.speeds.train, **train),
        **others,
    )
    return replace(
        scenario,
        work=_changed_work(scenario.work, _work_fields(work, config.work.lengths)),
        speeds=speeds,
        costs=replace(scenario.costs, **_said(config.costs)),
        limits=replace(scenario.limits, **{name: cluster[name] for name in LIMITS if name in cluster}),
        coalesce_s=cluster.get("coalesce_s", scenario.coalesce_s),
    )


def _work_fields(said: dict[str, Any], lengths: LengthsConfig) -> dict[str, Any]:
    """Fields of a `WorkLoad` by the keys of the config."""
    renamed = {"steps": "num_steps", "prompts_per_step": "groups_per_step", "lengths": "draw"}
    return {renamed.get(name, name): _draw(lengths) if name == "lengths" else value for name, value in said.items()}


def _topology(cluster: SimulatedCluster, placement: Placement) -> Topology:
    if cluster.slots_per_node is None:
        return ONE_NODE
    return Topology.of(cluster.slots_per_node, max(placement.slots) // cluster.slots_per_node + 1)


def _listed(texts: Sequence[str]) -> tuple[str, ...]:
    """The layouts. Raises ValueError for a text of none."""
    for text in texts:
        try:
            parse_sizes(text)
        except LayoutTextError as error:
            raise ValueError(f"cluster.layouts: {text!r}: {error}") from error
    return tuple(texts)


def _changed_work(work: WorkLoad, said: dict[str, Any]) -> WorkLoad:
    # Other groups than the recorded ones: each completion's length is then any of those recorded.
    given = {} if {"num_steps", "groups_per_step", "group_size", "draw"} & said.keys() else work.given
    return replace(work, given=given, **said)


def _said(section: Section) -> dict[str, Any]:
    """The keys that the user wrote."""
    return {name: getattr(section, name) for name in section.model_fields_set}


def _draw(lengths: LengthsConfig) -> DrawLength:
    if isinstance(lengths, LognormalLengths):
        return lognormal(lengths.median, lengths.sigma)
    file = Path(lengths.path)
    if not file.is_file():
        raise ValueError(f"work.lengths.path: there is no file {file}; write one with lengths in tokens, one a line")
    words = read_text(file).split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"work.lengths.path: {lengths.path} must hold whole numbers of tokens, one a line")
    return recorded([int(word) for word in words])
