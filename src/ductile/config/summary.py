"""What `ductile check` says: what a run would do, on which slots, and why."""

from collections.abc import Iterator

from ductile.config.on_disk import read_spec
from ductile.config.orchestrator import OrchestratorConfig
from ductile.config.parse import Parsed
from ductile.config.run import OrchestratorRunConfig, RLConfig, RunConfig, SFTConfig, TrainerRunConfig
from ductile.config.scheduling import policy_name
from ductile.config.slots import placement_of
from ductile.core.cluster.placement import Placement, many
from ductile.core.cluster.policies.names import described

Row = tuple[str, str]


def summary(parsed: Parsed[RunConfig], command: str) -> str:
    """Some lines for a person. The config has been found good."""
    config = parsed.config
    rows = [
        ("files", " < ".join(parsed.files) or "none: flags and defaults"),
        ("model", _model(config)),
        ("output", config.output_dir),
        *_work(config),
        *_slots(placement_of(config)),
        *_scheduling(config),
        *_column("derived", list(parsed.derived)),
    ]
    lines = (f"  {name:<10}{text}" for name, text in rows)
    return "\n".join([f"ductile {command}: the config is good.", "", *lines])


def _column(name: str, texts: list[str]) -> list[Row]:
    return [(name if index == 0 else "", text) for index, text in enumerate(texts)]


def _model(config: RunConfig) -> str:
    name = config.trainer.model.name if isinstance(config, RLConfig) else config.model.name
    spec = read_spec(name)
    if spec is None:
        return str(name)
    size = f"{spec.num_layers} layers of {spec.hidden_size}, {_count(spec.num_parameters)} parameters"
    return f"{name}: {spec.family}, {size}"


def _count(number: int) -> str:
    for unit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _work(config: RunConfig) -> Iterator[Row]:
    if isinstance(config, RLConfig):
        yield "steps", f"{config.max_steps or config.trainer.max_steps or 'no limit'}"
        yield from _questions(config.orchestrator)
        yield (
            "lengths",
            f"prompt and answer at most {config.inference.model.max_model_len} tokens, of which the answer "
            f"{config.orchestrator.sampling.max_tokens}; micro-batches of {config.trainer.model.seq_len}",
        )
        yield "loss", f"{config.trainer.loss.type}, {config.trainer.optim.type} with lr {config.trainer.optim.lr:g}"
    elif isinstance(config, OrchestratorRunConfig):
        yield "server", str(config.client.base_url)
        yield from _questions(config)
    elif isinstance(config, SFTConfig):
        yield "steps", str(config.max_steps or "one pass over the data")
        yield "batch", f"{config.data.batch_size} samples, packed to {config.data.seq_len} tokens"
    elif isinstance(config, TrainerRunConfig):
        yield "steps", str(config.max_steps)
    else:
        host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
        yield "serves", f"http://{host}:{config.server.port or '<a free port>'}/v1"


def _questions(config: OrchestratorConfig) -> Iterator[Row]:
    prompts = config.batch_size // config.rollouts_per_example
    yield (
        "batch",
        f"{config.batch_size} rollouts: {prompts} prompts, {config.rollouts_per_example} answers each; "
        f"{many(config.n_minibatches, 'optimizer step')}",
    )
    yield (
        "ahead",
        f"generation is at most {many(config.max_async_level, 'version')} ahead; answers more than "
        f"{many(config.max_off_policy_steps, 'version')} old are thrown away and asked again",
    )


def _slots(placement: Placement) -> list[Row]:
    if not placement.slots:
        return []
    table = [f"{slot:>3}  {' and '.join(placement.roles(slot))}" for slot in placement.slots]
    return _column("slots", [f"{placement.num_slots}, {placement.reason}", *table])


def _scheduling(config: RunConfig) -> Iterator[Row]:
    if not isinstance(config, RLConfig) or not config.cluster.auto_scheduler:
        return
    cluster = config.cluster
    who = described(policy_name(cluster), cluster.use_pre_process_policy, cluster.use_wait_before_last_iter_policy)
    yield "policy", f"{who}: slots change roles as it decides"
