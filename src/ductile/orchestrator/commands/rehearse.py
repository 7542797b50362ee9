"""What a command does before it starts a process, and nothing more: the second half of `ductile check`.

The very functions that a run calls, so whatever they refuse is found by the check: tokenizer, task, examples, held-out
prompts, checkpoints, custom functions. What only the machine can tell at the time (GPUs, a free port, permission to cap
slots) stays for the start.
"""

from pathlib import Path

from ductile.config.schema.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, RunConfig, SFTConfig
from ductile.orchestrator.commands.compose import prepare
from ductile.orchestrator.commands.rollout_only import prepare_rollout_only
from ductile.orchestrator.commands.sft import prepare_fake, prepare_sft
from ductile.orchestrator.commands.sinks import need
from ductile.orchestrator.ending.progress import Checkpoints
from ductile.orchestrator.ending.supervise import UNFIT
from ductile.tasks.tokenizer import Tokenizer


def violation(config: RunConfig) -> str:
    """Return why the command would start nothing, in a sentence; "" when it would start. The config has been found
    good."""
    try:
        _rehearse(config)
    except UNFIT as error:
        return str(error)
    return ""


def resumes(config: RunConfig) -> list[str]:
    """Return the checkpoint that the command would go on from, and a sentence for what is other than when it was
    written; nothing when it is not asked to resume. Raises what it refuses."""
    if not isinstance(config, RLConfig | SFTConfig) or config.ckpt.resume_step is None or config.bench is not None:
        return []
    checkpoints = Checkpoints(Path(config.output_dir) / "state")
    prepared = prepare(config) if isinstance(config, RLConfig) else prepare_sft(config)
    if not prepared.progress.step:
        return [f"nothing: {checkpoints.folder} has no checkpoint yet"]
    return [str(checkpoints.path(prepared.progress.step)), *(each.sentence for each in prepared.began.changes)]


def _rehearse(config: RunConfig) -> None:
    if isinstance(config, OrchestratorRunConfig):
        prepare_rollout_only(config)
        return
    if isinstance(config, RLConfig):
        prepare(config)
    elif isinstance(config, SFTConfig):
        prepare_sft(config)
    elif isinstance(config, InferenceRunConfig):
        Tokenizer.from_folder(str(config.model.name), config.model.chat_template)
    else:
        prepare_fake(config)
    if isinstance(config, RLConfig | SFTConfig):
        for package, table in (("wandb", config.wandb), ("tensorboard", config.tensorboard)):
            if table is not None:
                need(package)
