"""What must hold between sections before anything starts.

Pure on the tree, but for the files and folders that the config names (`on_disk.py`): an hour in a queue should not end
with "no such folder". Each finding says what to write instead.
"""

from collections.abc import Iterator
from pathlib import Path

from ductile.config.checks.access import client_findings, plain_http_notes, server_findings
from ductile.config.checks.asked_placement import placement_of
from ductile.config.checks.asked_policy import scheduling_findings
from ductile.config.checks.asked_servers import EXAMPLE
from ductile.config.checks.asked_servers import server_findings as named_server_findings
from ductile.config.checks.asked_servers import server_notes as named_server_notes
from ductile.config.checks.deployment import deployment_findings
from ductile.config.checks.exclusions import exclusion_findings, exclusion_warnings
from ductile.config.checks.fleet_findings import fleet_findings, registry_findings, registry_key_findings
from ductile.config.checks.generation import (
    generation_config_notes,
    generator_findings,
    length_findings,
    sampling_findings,
    sampling_warnings,
    server_warnings,
    template_findings,
)
from ductile.config.checks.generation_config import generation_defaults
from ductile.config.checks.numeric_traps import numeric_traps
from ductile.config.checks.on_disk import (
    data_findings,
    import_findings,
    model_findings,
    num_rows,
    read_spec,
    task_findings,
)
from ductile.config.checks.placement_findings import deadline_warnings, placement_findings
from ductile.config.checks.scorer_findings import scorer_warnings
from ductile.config.checks.serving_plan import router_findings, serving_findings, serving_notes
from ductile.config.checks.trainer_layout import layout_warnings, room_warnings
from ductile.config.checks.written import output_findings
from ductile.config.finding import Finding
from ductile.config.reading.unread import unread_findings, unread_notes
from ductile.config.schema.bench import load_findings, server_notes, warmup_findings
from ductile.config.schema.model import TrainerModelConfig
from ductile.config.schema.orchestrator import BuiltinTask, JsonlTask, OrchestratorConfig, ReasoningGymTask, TaskConfig
from ductile.config.schema.run import (
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RouterRunConfig,
    RunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from ductile.config.schema.section import Section
from ductile.config.schema.trace import trace_findings
from ductile.config.schema.trainer import (
    CustomLoss,
    LinearSchedule,
    LossConfig,
    SchedulerConfig,
    in_steps,
    needs_reference,
)
from ductile.config.server_address import is_address

SCORELESS = frozenset({"default", "ipo"})
"""Losses that look at the scorer's log-probs only for their KL term."""


def preflight(config: Section) -> list[Finding]:
    """Everything between the lines of a config that cannot work."""
    return [*_of_command(config), *deployment_findings(config), *unread_findings(config)]


def _of_command(config: Section) -> Iterator[Finding]:
    if isinstance(config, RLConfig):
        yield from [*_rl(config), *placement_findings(config), *scheduling_findings(config.cluster)]
        yield from exclusion_findings(config)
    elif isinstance(config, SFTConfig):
        yield from [*_sft(config), *placement_findings(config), *exclusion_findings(config)]
    elif isinstance(config, TrainerRunConfig):
        yield from [*_trainer(config), *placement_findings(config), *exclusion_findings(config)]
    elif isinstance(config, OrchestratorRunConfig):
        yield from _orchestrator_alone(config)
    elif isinstance(config, InferenceRunConfig):
        yield from _inference_alone(config)
    elif isinstance(config, RouterRunConfig):
        yield from router_findings(config)
    if isinstance(config, RunConfig):
        yield from warmup_findings(config.bench)
    if isinstance(config, RLConfig | SFTConfig | TrainerRunConfig):
        own = config.trainer.max_steps if isinstance(config, RLConfig) else None
        yield from trace_findings(config.trace, config.bench is not None, config.max_steps or own)


def warnings(config: Section) -> list[str]:
    """What is accepted and does nothing, because configs of other systems or for other commands have it, or does what
    hardly anybody wants."""
    said = [*unread_notes(config), *_bench_notes(config)]
    if isinstance(config, RLConfig | SFTConfig | TrainerRunConfig):
        said += [*layout_warnings(config, len(placement_of(config).train)), *numeric_traps(config)]
        said += exclusion_warnings(config)
    if isinstance(config, RLConfig | SFTConfig):
        said += room_warnings(config)
    if isinstance(config, OrchestratorRunConfig):
        said += server_warnings("sampling", config.sampling)
        said += generation_config_notes(config.sampling, config.model.name)
    if isinstance(config, InferenceRunConfig):
        said += [*generation_config_notes(config, config.model.name), *serving_notes(config)]
    if isinstance(config, InferenceRunConfig | RouterRunConfig):
        said += plain_http_notes(config.server, "server")
    if not isinstance(config, RLConfig):
        return said
    said += scorer_warnings(config, placement_of(config))
    loss = config.trainer.loss
    if loss.type in SCORELESS and not needs_reference(loss) and placement_of(config).score:
        said.append(
            f'the score slots have no effect here: loss "{loss.type}" compares with what the generators say. They are '
            'for "grpo", "custom" and kl_coef'
        )
    said += [*deadline_warnings(config.cluster), *named_server_notes(config)]
    said += generation_config_notes(config.orchestrator.sampling, config.inference.model.name)
    said += _system_prompts(config.orchestrator)
    return [*said, *sampling_warnings("orchestrator.sampling", config.orchestrator.sampling)]


def _system_prompts(config: OrchestratorConfig) -> Iterator[str]:
    """A note where a task of the evaluation's own asks without the system prompt that is trained with."""
    train, evaluated = config.task, config.eval.task
    if not isinstance(train, JsonlTask | ReasoningGymTask) or not isinstance(evaluated, JsonlTask | ReasoningGymTask):
        return
    if config.eval.enabled and train.system_prompt and not evaluated.system_prompt:
        yield (
            "orchestrator.task.system_prompt is not for orchestrator.eval.task, which has a key of its own: evaluation "
            "asks without a system prompt"
        )


def _rl(config: RLConfig) -> Iterator[Finding]:
    trainer, inference, orchestrator = config.trainer, config.inference, config.orchestrator
    if trainer.model.name is None and inference.model.name is None:
        yield _no_model("model.name")
    elif trainer.model.name is None or inference.model.name is None:
        missing = "trainer.model.name" if trainer.model.name is None else "inference.model.name"
        yield Finding((missing,), "is missing: write model.name, which goes to the trainer and to the generators")
    elif trainer.model.name != inference.model.name:
        yield Finding(
            ("inference.model.name", "trainer.model.name"),
            f'must be the trainer\'s model ("{trainer.model.name}"), whose weights the generators receive. '
            "Write model.name for both",
        )
    if trainer.model.lora is None and inference.model.lora is not None:
        what = "would wait for adapters that nobody trains. Write trainer.model.lora, which goes to both"
        yield Finding(("inference.model.lora", "trainer.model.lora"), what)
    yield from model_findings("trainer.model.name", trainer.model.name)
    if trainer.model.debug.num_layers is not None:
        what = "is for `ductile trainer` and `ductile sft`: here the generators hold the whole model. Leave it out"
        yield Finding(("trainer.model.debug.num_layers",), what)
    if trainer.model.seq_len < inference.model.max_model_len:
        yield Finding(
            ("trainer.model.seq_len", "inference.model.max_model_len"),
            f"must be at least inference.model.max_model_len ({inference.model.max_model_len}): the trainer takes "
            "whole completions. seq_len sets both",
        )
    if trainer.loss.type == "sft":
        yield Finding(("trainer.loss.type",), 'is for `ductile sft`. Write "default", "ipo", "grpo" or "custom"')
    yield from named_server_findings(config)
    yield from _loss(trainer.loss, "trainer.")
    yield from client_findings(orchestrator.client, "orchestrator.client")
    yield from _task_findings(orchestrator, "orchestrator.")
    yield from _batch(orchestrator, "orchestrator.")
    if config.bench is None:  # which evaluates nothing, and holds nothing out
        yield from _evaluation(orchestrator, "orchestrator.")
    yield from length_findings(orchestrator, inference.model.max_model_len)
    tables = {"orchestrator.sampling": orchestrator.sampling}
    if orchestrator.eval.enabled:
        tables["orchestrator.eval.sampling"] = orchestrator.eval.sampling
    for key, sampling in tables.items():
        yield from sampling_findings(key, sampling, read_spec(trainer.model.name))
    yield from generator_findings(inference, "inference.", read_spec(trainer.model.name), config.cluster.device)
    yield from fleet_findings(inference, "inference.")
    client_at = "orchestrator.client"
    yield from registry_key_findings(inference.registry, "inference.registry", orchestrator.client, client_at)
    numbers = {trainer.max_steps, orchestrator.max_steps} - {None}
    if config.max_steps is None and len(numbers) > 1:
        what = f"contradicts orchestrator.max_steps ({orchestrator.max_steps}): write max_steps, which sets both"
        yield Finding(("trainer.max_steps", "orchestrator.max_steps"), what)
    max_steps = config.max_steps or trainer.max_steps or orchestrator.max_steps
    num_steps = max_steps * orchestrator.n_minibatches if max_steps and config.bench is None else None
    yield from _schedule(trainer.scheduler, num_steps, "trainer.scheduler")
    yield from _bench(config)
    yield from output_findings(config)


def _sft(config: SFTConfig) -> Iterator[Finding]:
    yield from _trained_model(config.model)
    if config.bench is None:  # else the data is made up
        yield from data_findings(config.data)
    yield from template_findings("model", config.model)
    if config.model.seq_len < config.data.seq_len:
        yield Finding(
            ("model.seq_len", "data.seq_len"),
            f"must be at least data.seq_len ({config.data.seq_len}). Leave it out: data.seq_len sets it",
        )
    yield from _schedule(config.scheduler, config.max_steps if config.bench is None else None, "scheduler")
    yield from _bench(config)
    yield from output_findings(config)


def _trainer(config: TrainerRunConfig) -> Iterator[Finding]:
    yield from _trained_model(config.model)
    if config.data.fake is None:
        what = "is missing: the trainer alone has no generators, so it needs made-up data. Write --data.fake"
        yield Finding(("data.fake",), what)
    if config.max_steps is None and config.bench is None:
        yield Finding(("max_steps",), "is missing: write how many steps to take")
    yield from _loss(config.loss, "")
    if needs_reference(config.loss):
        what = "compares with a reference model, and made-up data has no log-probs of one. Leave it out"
        key = "needs_reference" if isinstance(config.loss, CustomLoss) else "kl_coef"
        yield Finding((f"loss.{key}",), what)
    yield from _schedule(config.scheduler, config.max_steps if config.bench is None else None, "scheduler")
    yield from output_findings(config)


def _orchestrator_alone(config: OrchestratorRunConfig) -> Iterator[Finding]:
    if config.model.name is None:
        yield Finding(("model.name",), "is missing: write the model folder whose tokenizer the server uses")
    yield from model_findings("model.name", config.model.name, needs_weights=False)
    if config.client.base_url is None:
        yield Finding(("client.base_url",), 'is missing: write the server to ask, such as "http://127.0.0.1:8000/v1"')
    elif wrong := [url for url in config.client.urls if not is_address(url)]:
        what = f'has {wrong[0]!r}; write the address of a server, with http:// or https://, such as "{EXAMPLE}"'
        yield Finding(("client.base_url",), what)
    yield from client_findings(config.client, "client")
    yield from _task_findings(config, "")
    yield from sampling_findings("sampling", config.sampling, read_spec(config.model.name))
    yield from template_findings("model", config.model)
    yield from output_findings(config)


def _inference_alone(config: InferenceRunConfig) -> Iterator[Finding]:
    if config.model.name is None:
        yield _no_model("model.name")
    yield from model_findings("model.name", config.model.name)
    yield from _generation_config(config)
    yield from generator_findings(config, "", read_spec(config.model.name), config.cluster.device)
    yield from serving_findings(config)
    yield from server_findings(config.server, "server")
    yield from registry_findings(config.registry, "registry")
    yield from registry_key_findings(config.registry, "registry", config.server, "server")
    yield from load_findings(config.bench, config)


def _generation_config(config: InferenceRunConfig) -> Iterator[Finding]:
    if config.model.name is not None and config.server.generation_config == "auto":
        try:
            generation_defaults(Path(config.model.name))
        except ValueError as error:
            what = f'has sampling defaults that cannot be used: {error}. server.generation_config = "ignore" skips them'
            yield Finding(("model.name",), what)


def _trained_model(config: TrainerModelConfig) -> Iterator[Finding]:
    if config.name is None:
        yield _no_model("model.name")
    debug = config.debug
    yield from model_findings("model.name", config.name, num_layers=debug.num_layers, random_init=debug.random_init)


def _loss(config: LossConfig, at: str) -> Iterator[Finding]:
    if isinstance(config, CustomLoss):
        yield from import_findings(f"{at}loss.import_path", config.import_path)


def _task_findings(config: OrchestratorConfig, at: str) -> Iterator[Finding]:
    """What a batch is made of."""
    if config.task is None:
        yield Finding((f"{at}task",), "is missing: write which prompts to take, such as task.type and task.name")
    else:
        yield from task_findings(config.task, f"{at}task")
    size, members = config.batch_size, config.rollouts_per_example
    if size % members:
        below, above = size - size % members, size + members - size % members
        choice = f"{below} or {above}" if below else f"{above}"
        yield Finding(
            (f"{at}batch_size", f"{at}rollouts_per_example"),
            f"must be a multiple of rollouts_per_example ({members}): write {choice}",
        )


def _batch(config: OrchestratorConfig, at: str) -> Iterator[Finding]:
    """What the trainer makes of a batch."""
    size, members = config.batch_size, config.rollouts_per_example
    if size % members == 0 and size // members < config.n_minibatches:
        yield Finding(
            (f"{at}n_minibatches", f"{at}batch_size", f"{at}rollouts_per_example"),
            f"must be at most {size // members}, the prompts of a batch ({size} rollouts / {members} each)",
        )
    if members == 1 and config.advantage.type != "custom":
        yield Finding(
            (f"{at}rollouts_per_example", f"{at}advantage.type"),
            f'must be at least 2: advantage "{config.advantage.type}" compares the completions of one prompt',
        )
    if config.sampling.temperature == 0:
        yield Finding(
            (f"{at}sampling.temperature",), "must be more than 0: greedy completions of one prompt are all the same"
        )
    if config.max_off_policy_steps < config.max_async_level:
        yield Finding(
            (f"{at}max_off_policy_steps", f"{at}max_async_level"),
            f"must be at least max_async_level ({config.max_async_level}), or what is generated ahead is thrown away",
        )
    if (config.advantage.type == "custom") != (config.advantage.import_path is not None):
        what = "is missing: write the function to call" if config.advantage.type == "custom" else "needs type custom"
        yield Finding((f"{at}advantage.import_path", f"{at}advantage.type"), what)
    elif config.advantage.import_path is not None:
        yield from import_findings(f"{at}advantage.import_path", config.advantage.import_path)


def _evaluation(config: OrchestratorConfig, at: str) -> Iterator[Finding]:
    if not config.eval.enabled:
        return
    if config.eval.task is not None:
        yield from task_findings(config.eval.task, f"{at}eval.task")
    task, wanted = config.eval.task or config.task, config.eval.num_examples
    size = num_examples(task)
    if size is None:
        return
    own, table = config.eval.task is not None, "eval.task" if config.eval.task else "task"
    path = task.path if isinstance(task, JsonlTask) else None
    called = f"{table}.size ({size})" if path is None else f"{size}, the lines of {path}"
    keys = (f"{at}eval.num_examples", f"{at}{table}.{'size' if path is None else 'path'}")
    if own and size < wanted and path is None:
        yield Finding(keys, f"must be at most {called}")
    elif not own and size <= wanted:
        what = f"must be less than {called}: these are the task's last examples, and training needs the others"
        yield Finding(keys, what)


def num_examples(task: TaskConfig | None) -> int | None:
    """How many a task has, where that can be seen from its config."""
    if isinstance(task, JsonlTask):
        return num_rows(task.path)
    return task.size if isinstance(task, ReasoningGymTask | BuiltinTask) else None


def _schedule(config: SchedulerConfig, num_steps: int | None, at: str) -> Iterator[Finding]:
    """`num_steps`: optimizer steps."""
    if num_steps is None:
        return
    warmup = in_steps(config.warmup_steps, num_steps)
    decay = in_steps(config.decay_steps or 0, num_steps) if isinstance(config, LinearSchedule) else 0
    if warmup + decay <= num_steps:
        return
    keys = (f"{at}.warmup_steps", f"{at}.decay_steps", "max_steps")
    if not decay:
        what = f"must be at most {num_steps}, the optimizer steps of the run. Write {num_steps // 10}"
        yield Finding(keys, f"{what}, or a share of the run: 0.1")
        return
    fits = num_steps * warmup // (warmup + decay)
    yield Finding(
        keys,
        f"is too long: with decay_steps ({decay}) it takes {warmup + decay} of {num_steps} optimizer steps. Write "
        f"warmup_steps = {fits} and decay_steps = {num_steps - fits}, or shares of the run: 0.1 and 0.5",
    )


def _bench_notes(config: Section) -> Iterator[str]:
    if isinstance(config, InferenceRunConfig):
        yield from server_notes(config.bench, config.server)
    if not isinstance(config, RLConfig | SFTConfig | TrainerRunConfig | OrchestratorRunConfig):
        return
    if config.bench is not None and config.max_steps not in (None, config.bench.steps):
        yield f"max_steps has no effect here: --bench takes bench.steps = {config.bench.steps}"


def _bench(config: RLConfig | SFTConfig) -> Iterator[Finding]:
    if config.bench is not None and config.ckpt.resume_step is not None:
        what = "takes a few first steps and keeps none: it goes on with no run. Leave --resume out"
        yield Finding(("bench", "resume", "ckpt.resume_step"), what)


def _no_model(key: str) -> Finding:
    return Finding((key,), "is missing: write the path of a Hugging Face model folder")
