"""Other spellings of keys: older ones, and those of other systems. Each is read as ductile's own, with a notice.

`inference.vllm.tensor_parallel_size` is the same key as `inference.parallel.tp`; a config that gives both with
different values hears of it.
"""

from collections.abc import Mapping
from functools import cache

from ductile.config.reading.errors import Problem, about, dotted, flag, show
from ductile.config.reading.provenance import Draft, Path, as_table, leaves
from ductile.config.schema.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from ductile.config.schema.simulate import SimulateConfig

Renames = Mapping[str, str]

_ORCHESTRATOR: Renames = {
    "group_size": "rollouts_per_example",
    "student.client": "client",
    "model.client": "client",
    "num_reward_workers": "graders.num_workers",
    "reward_timeout_s": "graders.timeout_s",
    "max_reward_error_share": "graders.max_error_share",
}
_INFERENCE: Renames = {
    "vllm.tensor_parallel_size": "parallel.tp",
    "vllm.data_parallel_size": "parallel.dp",
}
_RUN: Renames = {"clean_output_dir": "clean", "monitors.wandb": "wandb", "run.output_dir": "output_dir"}
_RESUME: Renames = {"resume.step": "ckpt.resume_step"}
_TRAINER: Renames = {"loss.normalise": "loss.aggregation"}


def _below(prefix: str, renames: Renames, into: str = "") -> Renames:
    return {f"{prefix}.{old}": f"{into or prefix}.{new}" for old, new in renames.items()}


_BY_ROOT: dict[type[Section], Renames] = {
    RLConfig: {
        **_RUN,
        **_RESUME,
        **_below("orchestrator", _ORCHESTRATOR),
        **_below("trainer", _TRAINER),
        **_below("inference", _INFERENCE),
        "orchestrator.model.name": "model.name",
        "orchestrator.student.model.name": "model.name",
        "orchestrator.output_dir": "output_dir",
        "trainer.output_dir": "output_dir",
        "trainer.ckpt": "ckpt",
        "orchestrator.ckpt": "ckpt",
        "trainer.wandb": "wandb",
        "orchestrator.wandb": "wandb",
        "trainer.log": "log",
        "orchestrator.log": "log",
        "inference.log": "log",
        "trainer.bench": "bench",
        "orchestrator.bench": "bench",
        "trainer.trace_path": "trace.dir",
        "tokenizer.chat_template": "model.chat_template",
        "orchestrator.chat_template_kwargs": "model.chat_template_kwargs",
        "weight_broadcast": "trainer.weight_broadcast",
        "orchestrator.weight_broadcast": "trainer.weight_broadcast",
        "inference.weight_broadcast": "trainer.weight_broadcast",
        "rollout_transport": "trainer.rollout_transport",
        "orchestrator.rollout_transport": "trainer.rollout_transport",
    },
    SFTConfig: {
        **_RUN,
        **_RESUME,
        **_TRAINER,
        "deployment.num_train_nodes": "deployment.num_nodes",
        "tokenizer.chat_template": "model.chat_template",
        "data.chat_template_kwargs": "model.chat_template_kwargs",
        "trace_path": "trace.dir",
    },
    TrainerRunConfig: {**_RUN, **_TRAINER, "trace_path": "trace.dir"},
    OrchestratorRunConfig: {
        **_RUN,
        **_ORCHESTRATOR,
        "student.model.name": "model.name",
        "tokenizer.chat_template": "model.chat_template",
        "chat_template_kwargs": "model.chat_template_kwargs",
    },
    InferenceRunConfig: {**_RUN, **_INFERENCE},
    SimulateConfig: {"costs.grant_s": "costs.assign_s", "costs.handoff_s": "costs.migration_s"},
}


@cache
def renames(root: type[Section]) -> dict[Path, Path]:
    """Old path to new path, for the command whose tree is `root`."""
    table = _BY_ROOT.get(root, {})
    return {tuple(old.split(".")): tuple(new.split(".")) for old, new in table.items()}


def rename_path(root: type[Section], path: Path) -> Path:
    """`path` in ductile's own spelling."""
    for old, new in renames(root).items():
        if path[: len(old)] == old:
            return (*new, *path[len(old) :])
    return path


def rename(root: type[Section], draft: Draft) -> tuple[Draft, list[str], list[Problem]]:
    """One source (a file, or all flags) in ductile's own spelling, with notices and problems.

    A key that is given in two spellings with one value is given once; with two values it is a problem.
    """
    out = draft.copy()
    notices: list[str] = []
    problems: list[Problem] = []
    for old, new in renames(root).items():
        if not draft.has(old):
            continue
        moved = draft.get(old)
        origin = draft.origin(old)
        notices.append(f"{dotted(old)} ({origin}) is read as {dotted(new)}")
        out.drop(old)
        table = as_table(moved)
        values = list(leaves(table, new)) if table else [(new, moved)]
        for path, value in values:
            was = (*old, *path[len(new) :])
            if draft.has(path) and draft.get(path) != value:
                what = f"is another spelling of {flag(path)}, which is {show(draft.get(path))} ({draft.origin(path)})."
                problems.append(about(was, value, draft.origin(was), what + " Write one of them."))
            elif not draft.has(path):
                out.put(path, value, draft.origin(was))
        _drop_empty(out, old[:-1])
    return out, notices, problems


def _drop_empty(draft: Draft, path: Path) -> None:
    """A table of which nothing is left after the move was never there."""
    while path and draft.get(path) == {}:
        draft.drop(path)
        path = path[:-1]
