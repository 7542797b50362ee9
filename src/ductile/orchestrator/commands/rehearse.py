"""What a command does before it starts a process, and nothing more: the second half of `ductile check`.

The very functions that a run calls, so whatever they refuse is found by the check: tokenizer, task, examples, held-out
prompts, checkpoints, custom functions. What only the machine can tell at the time (GPUs, a free port, permission to cap
slots) stays for the start.
"""

from dataclasses import replace
from pathlib import Path

from ductile.config.schema.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, RunConfig, SFTConfig
from ductile.orchestrator.commands.compose import prepare
from ductile.orchestrator.commands.rollout_only import prepare_rollout_only
from ductile.orchestrator.commands.sft import AboutData, prepare_fake, prepare_sft
from ductile.orchestrator.commands.sinks import need
from ductile.orchestrator.ending.progress import Checkpoints
from ductile.roles import Task
from ductile.tasks.prompts import prompt_ids
from ductile.tasks.task import messages_of, variables_of
from ductile.tasks.tokenizer import Tokenizer
from ductile.tasks.turn_text import TurnText


def rehearse(config: RunConfig) -> AboutData:
    """Return what the command would say of its data, and its first example as the model sees it. The config has been
    found good.

    Raises what the command would refuse, each with a sentence (`supervise.UNFIT`).
    """
    if isinstance(config, OrchestratorRunConfig):
        alone = prepare_rollout_only(config)
        about = _first_prompt(alone.tokenizer, alone.task, 0)
        return replace(about, sentence=" ".join(filter(None, (about.sentence, alone.tokenizer.dated))))
    if isinstance(config, RLConfig):
        prepared = prepare(config)
        about = _first_prompt(prepared.tokenizer, prepared.tasks["train"], prepared.train_examples[0])
        about = replace(about, sentence=" ".join(filter(None, (about.sentence, *prepared.notes()))))
    elif isinstance(config, SFTConfig):
        about = prepare_sft(config).data
    elif isinstance(config, InferenceRunConfig):
        Tokenizer.of(config.model)
        about = AboutData()
    else:
        about = prepare_fake(config).data
    if isinstance(config, RLConfig | SFTConfig):
        for package, table in (("wandb", config.wandb), ("tensorboard", config.tensorboard)):
            if table is not None:
                need(package)
    return about


def _first_prompt(tokenizer: Tokenizer, task: Task, example: int) -> AboutData:
    """Return the prompt, and how the policy's turn begins for a reward, where the prompt has begun it."""
    opened = TurnText(tokenizer).opened(messages_of(task, example), **variables_of(task, example))
    sentence = f"Rewards are given completions that begin with {opened!r}, as prompts end." if opened else ""
    return AboutData(sentence, first=tokenizer.decode(prompt_ids(task, tokenizer, example), skip_special_tokens=False))


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
