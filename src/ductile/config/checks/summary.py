"""What `ductile check` says: what a run would do, on which slots, and why."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

from ductile.config.checks.asked_placement import most_slots, placement_of
from ductile.config.checks.asked_policy import policy_name
from ductile.config.checks.asked_servers import servers_in_words
from ductile.config.checks.on_disk import read_spec
from ductile.config.checks.preflight import num_examples
from ductile.config.checks.scorer_findings import scorers_in_words
from ductile.config.checks.serving_plan import (
    NodeServers,
    PlannedServer,
    planned_servers,
    router_of,
    router_port,
    servers_on_nodes,
)
from ductile.config.checks.trainer_layout import (
    TrainingConfig,
    layout_rules,
    memory_options,
    slot_memory,
    state_bytes,
)
from ductile.config.checks.written import of_a_run
from ductile.config.reading.parse import Parsed
from ductile.config.schema.bench import BenchConfig, load_of
from ductile.config.schema.http_server import HttpServerConfig
from ductile.config.schema.model import AdaptedModelConfig
from ductile.config.schema.orchestrator import ImportTask, JsonlTask, OrchestratorConfig, TaskConfig
from ductile.config.schema.run import (
    CommandConfig,
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RouterRunConfig,
    RunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from ductile.core.instances.instances import slot_groups
from ductile.core.instances.node_devices import device_uses, visible_devices
from ductile.core.instances.placement import Placement, many
from ductile.core.layout.choice.layout_rules import ChosenLayout, LayoutRules, choose_layout, dims_allowed, layout_for
from ductile.core.layout.choice.layout_text import compact, in_words
from ductile.core.layout.choice.mesh_table import MOST_ROWS, EachBytes, in_bytes, mesh_table
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.options import DTYPE_BYTES
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.scheduling.policies.names import described

Row = tuple[str, str]


def summary(
    parsed: Parsed[CommandConfig], command: str, resumes: Sequence[str] = (), data: str = "", first: str = ""
) -> str:
    """Some lines for a person. The config has been found good. resumes: what from, when that is asked for, and what is
    other than it was. data: a sentence about it. first: the first example, as the model sees it."""
    config = parsed.config
    if isinstance(config, RouterRunConfig):
        return _router_summary(config)
    rows = [
        ("files", " < ".join(parsed.files) or "none: flags and defaults"),
        ("model", _model(config)),
        ("output", _output(config)),
        *_column("resumes", resumes),
        *_work(config),
        *([("rows", data)] if data else []),
        *_slots(config),
        *(_column("servers", servers_in_words(config)) if isinstance(config, RLConfig) else []),
        *(_mesh(config) if isinstance(config, RLConfig | SFTConfig | TrainerRunConfig) else []),
        *_scheduling(config),
        *_column("derived", list(parsed.derived)),
    ]
    lines = [f"  {name:<10}{text}" for name, text in rows]
    if first:
        lines += ["", f"  The first example, as the model sees it{TRAINED if '[[' in first else ''}:", ""]
        lines += [f"    {line}" for line in _middle_out(first).splitlines()]
    return "\n".join([f"ductile {command}: the config is good.", "", *lines])


def _router_summary(config: RouterRunConfig) -> str:
    """Return some lines for a person, of a router whose config has been found good."""
    rows = [
        ("serves", _address(config.server, config.server.port)),
        *_column("servers", config.urls),
        *_column("prefill", config.prefill_urls),
        ("policy", config.policy),
    ]
    lines = [f"  {name:<10}{text}" for name, text in rows]
    return "\n".join(["ductile router: the config is good.", "", *lines])


TRAINED = ", what is trained in [[ ]]"
SHOWN_CHARS = 2000


def _middle_out(text: str) -> str:
    """Return a text of at most `SHOWN_CHARS`, the first and the last ones of a longer one."""
    left_out = len(text) - SHOWN_CHARS
    half = SHOWN_CHARS // 2
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out} characters ...]\n{text[-half:]}"


def _output(config: RunConfig) -> str:
    if isinstance(config, InferenceRunConfig) or config.bench is not None or not config.clean:
        return config.output_dir
    there = of_a_run(Path(config.output_dir))
    return config.output_dir + (", where it deletes the run that is there when its first step is done" if there else "")


def _column(name: str, texts: Sequence[str]) -> list[Row]:
    return [(name if index == 0 else "", text) for index, text in enumerate(texts)]


def _model(config: RunConfig) -> str:
    model = config.trainer.model if isinstance(config, RLConfig) else config.model
    spec = read_spec(model.name)
    if spec is None:
        return str(model.name)
    size = f"{spec.num_layers} layers of {spec.hidden_size}, {_count(spec.num_parameters)} parameters"
    adapted = ""
    if isinstance(model, AdaptedModelConfig) and (lora := model.adapters):
        num = _count(replace(spec, lora=lora).num_trained)
        on = ", ".join(lora.targets)
        adapted = f"; adapters of rank {lora.rank} on {on}: {num} parameters, which alone are trained"
    return f"{model.name}: {spec.family}, {size}{adapted}"


def _count(number: int) -> str:
    for unit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _work(config: RunConfig) -> Iterator[Row]:
    if isinstance(config, RLConfig):
        given = config.max_steps or config.trainer.max_steps or config.orchestrator.max_steps
        yield "steps", _steps(given, config.bench, "one pass over the task's examples")
        yield from _prompts(config.orchestrator)
        yield (
            "lengths",
            f"prompt and completion at most {config.inference.model.max_model_len} tokens, of which the completion "
            f"{config.orchestrator.sampling.max_tokens}; micro-batches of {config.trainer.model.seq_len}",
        )
        yield "loss", f"{config.trainer.loss.type}, {config.trainer.optim.type} with lr {config.trainer.optim.lr:g}"
        yield from _column("eval", _evaluation(config.orchestrator, config.bench))
    elif isinstance(config, OrchestratorRunConfig):
        yield "server", ", ".join(config.client.urls)
        yield from _prompts(config)
    elif isinstance(config, SFTConfig):
        yield "steps", _steps(config.max_steps, config.bench, "one pass over the data")
        yield "batch", f"{config.data.batch_size} samples, packed to {config.data.seq_len} tokens"
    elif isinstance(config, TrainerRunConfig):
        yield "steps", _steps(config.max_steps, config.bench, "1")
    elif config.bench is not None:
        load = load_of(config.bench, config)
        yield "rounds", _steps(None, config.bench, "")
        sizes = f"{load.prompt_tokens} tokens, completed with {load.max_tokens}"
        yield "load", f"{many(load.num_requests, 'request')} at once: {sizes}"
    else:
        router = router_of(config)
        port = config.server.port if router is None else router_port(config, router)
        yield "serves", _address(config.server, port)
        if on_nodes := servers_on_nodes(config):
            yield from _column("servers", [_servers(group) for group in on_nodes])
        elif router is not None:
            yield from _column("servers", [_server(config.server, each) for each in planned_servers(config)])


def _servers(group: NodeServers) -> str:
    does = {"any": "", "prefill": ", which compute prompts", "decode": ", which go on with them"}[group.role]
    ports = f"port {group.port}" if group.each == 1 else f"ports from {group.port} on"
    return f"{group.each} on each of {many(group.num_nodes, 'node')}, at {ports}{does}"


def _server(settings: HttpServerConfig, server: PlannedServer) -> str:
    does = {"any": "", "prefill": ", computes prompts", "decode": ", goes on with them"}[server.role]
    return f"{_address(settings, server.port).removesuffix('/v1')}, on device {server.number}{does}"


def _address(settings: HttpServerConfig, port: int) -> str:
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.ssl_certfile else 'http'}://{name}:{port or '<a free port>'}/v1"


def _steps(given: int | None, bench: BenchConfig | None, otherwise: str) -> str:
    if bench is None:
        return str(given or otherwise)
    warming_up = "the first of which is" if bench.warmup_steps == 1 else f"the first {bench.warmup_steps} of which are"
    return f"{bench.steps}, {warming_up} not counted (--bench)"


def _evaluation(orchestrator: OrchestratorConfig, bench: BenchConfig | None) -> list[str]:
    """How often, how it samples, and which examples are held out for it."""
    config = orchestrator.eval
    if bench or not config.enabled:
        why = "--bench" if bench else "orchestrator.eval.enabled is false"
        return [f"none, and nothing is held out: {why}"]
    often = f", every {many(config.interval, 'step')}" if config.interval else ""
    temperature = config.sampling.temperature
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    completions = many(config.samples_per_example, "completion")
    asked = f"{completions} for each of {many(config.num_examples, 'prompt')}"
    when = f"before step 1{often} and at the end"
    measured = f"{when}: {asked}, {how}, at most {config.sampling.max_tokens} tokens"
    return [measured, _held_out(orchestrator)]


def _held_out(config: OrchestratorConfig) -> str:
    held_out = config.eval.num_examples
    if config.eval.task is not None:
        return f"held out: the first {held_out} of {_named(config.eval.task)}"
    size = num_examples(config.task)
    rest = f"; {many(size - held_out, 'example')} to train on" if size is not None else ""
    return f"held out: the task's last {held_out} (orchestrator.eval.num_examples){rest}"


def _task(config: OrchestratorConfig) -> Iterator[Row]:
    """What is asked, and how completions are scored."""
    if config.task is None:
        return
    size = num_examples(config.task)
    yield "task", _named(config.task) + (f", {many(size, 'example')}" if size is not None else "")
    if isinstance(config.task, JsonlTask):
        names = [config.task.reward] if isinstance(config.task.reward, str) else config.task.reward
        weights = config.task.reward_weights or [1.0] * len(names)
        shown = [name if weight == 1 else f"{weight:g} x {name}" for name, weight in zip(names, weights, strict=True)]
        yield "reward", " + ".join(shown)


def _named(task: TaskConfig) -> str:
    match task:
        case JsonlTask():
            return task.path
        case ImportTask():
            return task.import_path
        case _:
            return f"{task.name} of {task.type}"


def _prompts(config: OrchestratorConfig) -> Iterator[Row]:
    yield from _task(config)
    prompts = config.batch_size // config.rollouts_per_example
    yield (
        "batch",
        f"{config.batch_size} rollouts: {prompts} prompts, {config.rollouts_per_example} completions each; "
        f"{many(config.n_minibatches, 'optimizer step')}",
    )
    yield (
        "ahead",
        f"generation is at most {many(config.max_async_level, 'version')} ahead; {_on_stale(config)}",
    )


def _on_stale(config: OrchestratorConfig) -> str:
    most = f"{many(config.max_off_policy_steps, 'version')} old"
    if not min(config.max_async_level, config.max_off_policy_steps):
        return "every token is sampled from the version that it trains"
    if config.on_stale == "wait":
        return f"the trainer waits for completions before they are more than {most}"
    return f"completions more than {most} are thrown away and asked again"


def _slots(config: RunConfig) -> list[Row]:
    placement = placement_of(config)
    if isinstance(config, OrchestratorRunConfig) or not placement.slots:
        return []
    if placement.num_slots <= MOST_ROWS:
        table = [f"{slot:>3}  {' and '.join(placement.roles(slot))}" for slot in placement.slots]
    else:
        alike = [(compact(list(slots)), roles) for roles, slots in groupby(placement.slots, key=placement.roles)]
        width = max(len(slots) for slots, _ in alike)
        table = [f"  {slots:>{width}}  {' and '.join(roles)}" for slots, roles in alike]
    cluster = config.cluster
    if cluster.slots_per_device > 1:
        size = config.scorer.tp if isinstance(config, RLConfig) else 1
        groups = {"train": [placement.train], "score": slot_groups(placement.score, (), size)}
        table.append(_on_gpus(groups, cluster.slots_per_device, certain=cluster.device == "cuda"))
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        table += _visible_gpus(config, placement, visible)
    if isinstance(config, RLConfig) and (scorers := scorers_in_words(config, placement)):
        table.append(scorers)
    return _column("slots", [f"{placement.num_slots}, {placement.reason}", *table])


def _visible_gpus(config: RunConfig, placement: Placement, visible: str) -> Iterator[str]:
    """Yield which GPUs of this machine the roles get, where CUDA_VISIBLE_DEVICES chooses them."""
    assert not isinstance(config, OrchestratorRunConfig)
    if config.cluster.device == "cpu" or config.cluster.num_nodes > 1:
        return
    devices, each = visible_devices(0, visible), config.cluster.slots_per_device
    if placement.num_slots > len(devices) * each:
        yield f"CUDA_VISIBLE_DEVICES={visible} shows {many(len(devices), 'GPU')}, too few for these slots"
        return
    uses = device_uses(placement, devices, 1, each)
    of_roles = {
        roles: [use.device for use in uses if use.roles == roles] for roles in dict.fromkeys(u.roles for u in uses)
    }
    said = "; ".join(f"{' and '.join(roles)}: GPU {', '.join(names)}" for roles, names in of_roles.items())
    yield f"{said} (CUDA_VISIBLE_DEVICES)"


def _mesh(config: TrainingConfig) -> list[Row]:
    """Rows about the trainer's mesh: where its state lies, and why there."""
    train, rules = placement_of(config).train, layout_rules(config)
    chosen, layout = choose_layout(len(train), rules), layout_for(train, rules)
    trainer, root = (config.trainer, "trainer.") if isinstance(config, RLConfig) else (config, "")
    parts = many(layout.num_data_parallel, "data-parallel rank")
    table = [f"{in_words(layout.dims)}: {parts} on {many(len(train), 'slot')}"] if len(train) > 1 else []
    if rules.spec is not None:
        each = EachBytes(state_bytes(trainer), DTYPE_BYTES[trainer.model.optimization_dtype])
        lines = mesh_table(rules.spec, layout, each)
        table += [f"  {line}" for line in lines] if table else lines
    others, memory = _other_layouts(config, len(train), rules), _memory(config, rules.spec, layout.dims)
    why = _column("why", _reasons(chosen, rules, root))
    return [*_column("mesh", table), *why, *_column("resizes", others), *_column("memory", memory)]


def _memory(config: TrainingConfig, spec: ModelSpec | None, dims: ParallelDims) -> list[str]:
    """Return lines that say how much a train slot takes at its worst moment, as predicted; none where that is not
    known."""
    if spec is None:
        return []
    use, room = predict(spec, dims, memory_options(config)), slot_memory(config)
    of = f" of {in_bytes(room.room_bytes)}" if room else ""
    said = f"a slot takes about {in_bytes(use.device.total)}{of} in the {use.moment}"
    parts = ", ".join(
        f"{name} {in_bytes(size)}" for name, size in use.device.largest_first() if size * 50 > use.device.total
    )
    host = f"; {in_bytes(use.host.total)} in host memory" if use.host.total else ""
    return [f"{said}{host}", parts]


def _reasons(chosen: ChosenLayout, rules: LayoutRules, root: str) -> list[str]:
    """Why each axis above 1 has its size."""
    dims, planned, found = chosen.layout.dims, chosen.planned, list[str]()
    for axis in ("pp", "dp_replicate", "cp", "tp"):
        if (size := getattr(dims, axis)) > 1 or axis in planned.reasons:
            given = f"{root}resize.layouts has {chosen.listed}" if chosen.listed else f"as {root}model.{axis} says"
            if axis == "dp_replicate" and not chosen.listed and rules.nodes_per_fsdp_group:
                given = f"a copy over {many(rules.nodes_per_fsdp_group, 'node')}, by deployment.nodes_per_fsdp_group"
            found.append(f"{axis} {size}: {planned.reasons.get(axis, given)}")
    if dims.dp_shard > 1:
        found.append(f"dp_shard {dims.dp_shard}: what the other axes leave of {many(len(chosen.layout.slots), 'slot')}")
    if dims.pp > 1:
        found.append(f"stages: {planned.reasons.get('stages', 'equally many layers')} ({rules.asked.pp_schedule})")
    if dims.cp > 1:
        found.append(f"cp_style {planned.cp_style}: {planned.reasons.get('cp_style', f'as {root}model.cp_style says')}")
    return found


def _other_layouts(config: TrainingConfig, num_train: int, rules: LayoutRules) -> list[str]:
    """Layouts that the trainer would have on other numbers of slots, where they are not all data parallelism alone; and
    the numbers on which it has none."""
    most = placement_of(config).num_slots
    if not config.cluster.auto_scheduler:
        most = max(most, most_slots(config))
    shown = min(most, MOST_ROWS)
    allowed = dims_allowed(shown, rules)
    others = {number: dims for number, dims in allowed.items() if number != num_train}
    plain = [number for number, dims in others.items() if dims == ParallelDims(dp_shard=number)]
    said = [f"{number} as {in_words(dims)}" for number, dims in others.items() if number not in plain]
    refused = [number for number in range(1, shown + 1) if number not in allowed]
    if not said and not refused:
        return []
    said += [f"{compact(plain)} as data parallelism"] if plain else []
    said += [f"none on {compact(refused)}"] if refused else []
    more = f"; so on to {most}" if most > MOST_ROWS else ""
    return [f"slots: {'; '.join(said)}{more}"]


def _on_gpus(groups: Mapping[str, Sequence[Sequence[int]]], each: int, certain: bool) -> str:
    """How groups fare where several slots share a GPU. groups: slots of each, by role."""
    said = f"{each} slots share each GPU" if certain else f"where there are GPUs, {each} slots share each"
    pairs = [(role, *pair) for role, of_role in groups.items() for slots in of_role for pair in pairwise(sorted(slots))]
    if not pairs:
        return said
    sharing = next(((role, a, b) for role, a, b in pairs if a // each == b // each), None)
    if sharing is None:
        roles = " or ".join(dict.fromkeys(role for role, _, _ in pairs))
        return f"{said}; no two {roles} slots do at the start, so their collectives go through NCCL"
    how = "a group that has both goes through gloo and the host's memory, as NCCL takes one rank a GPU"
    return f"{said}; {sharing[0]} slots {sharing[1]} and {sharing[2]} do: {how}"


def _scheduling(config: RunConfig) -> Iterator[Row]:
    if not isinstance(config, RLConfig) or not config.cluster.auto_scheduler:
        return
    cluster = config.cluster
    who = described(policy_name(cluster), cluster.use_pre_process_policy, cluster.use_wait_before_last_iter_policy)
    yield "policy", f"{who}: slots change roles as it decides"
