"""What a command does before it starts a process, and nothing more: the second half of `ductile check`.

The very functions that a run calls, so whatever they refuse is found by the check: tokenizer, task, examples, held-out
prompts, checkpoints, custom functions. What only the machine can tell at the time (GPUs, a free port, permission to cap
slots) stays for the start.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from ductile.config.schema.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, RunConfig, SFTConfig
from ductile.orchestrator.commands.compose import prepare
from ductile.orchestrator.commands.rollout_only import prepare_rollout_only
from ductile.orchestrator.commands.sft import AboutData, prepare_fake, prepare_sft
from ductile.orchestrator.commands.sinks import need
from ductile.orchestrator.ending.meaning import Beginning
from ductile.orchestrator.ending.progress import Checkpoints
from ductile.roles import Task
from ductile.tasks.prompts import prompt_ids
from ductile.tasks.task import messages_of, variables_of
from ductile.tasks.tokenizer import Tokenizer
from ductile.tasks.turn_text import TurnText


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Sentences of a command before it starts a process."""

    about: AboutData
    resumes: tuple[str, ...] = ()
    """The checkpoint that it would go on from, and a sentence for each thing that is other than when that was written;
    nothing when it is not asked to resume."""


def rehearse(config: RunConfig) -> Rehearsal:
    """Return what the command would say of its data, with the first example as the model sees it, and of the checkpoint
    that it would go on from. The config has been found good.

    Raises what the command would refuse, each with a sentence (`supervise.UNFIT`).
    """
    if isinstance(config, OrchestratorRunConfig):
        alone = prepare_rollout_only(config)
        about = _first_prompt(alone.tokenizer, alone.task, 0)
        dated = alone.tokenizer.dated
        return Rehearsal(replace(about, sentence=" ".join(filter(None, (about.sentence, dated)))))
    resumes = ()
    if isinstance(config, RLConfig):
        prepared = prepare(config)
        about = _first_prompt(prepared.tokenizer, prepared.tasks["train"], prepared.train_examples[0])
        about = replace(about, sentence=" ".join(filter(None, (about.sentence, *prepared.notes()))))
        resumes = _resumes(config, prepared.began)
    elif isinstance(config, SFTConfig):
        batches = prepare_sft(config)
        about, resumes = batches.data, _resumes(config, batches.began)
    elif isinstance(config, InferenceRunConfig):
        Tokenizer.of(config.model)
        about = AboutData()
    else:
        about = prepare_fake(config).data
    if isinstance(config, RLConfig | SFTConfig):
        for package, table in (("wandb", config.wandb), ("tensorboard", config.tensorboard)):
            if table is not None:
                need(package)
    return Rehearsal(about, resumes)


def _first_prompt(tokenizer: Tokenizer, task: Task, example: int) -> AboutData:
    """Return the prompt, and how the policy's turn begins for a reward, where the prompt has begun it."""
    opened = TurnText(tokenizer).opened(messages_of(task, example), **variables_of(task, example))
    sentence = f"Rewards are given completions that begin with {opened!r}, as prompts end." if opened else ""
    return AboutData(sentence, first=tokenizer.decode(prompt_ids(task, tokenizer, example), skip_special_tokens=False))


def _resumes(config: RLConfig | SFTConfig, began: Beginning) -> tuple[str, ...]:
    if config.ckpt.resume_step is None or config.bench is not None:
        return ()
    checkpoints = Checkpoints(Path(config.output_dir) / "state")
    if not began.progress.step:
        return (f"nothing: {checkpoints.folder} has no checkpoint yet",)
    return (str(checkpoints.path(began.progress.step)), *(each.sentence for each in began.changes))
