"""What a command does before it starts a process, and nothing more: the second half of `ductile check`.

The very functions that a run calls, so whatever they refuse is found by the check: tokenizer, task, examples, held-out
prompts, checkpoints, custom functions. Weights are the slots' own to load; their files are looked at by their headers.
What only the machine can tell at the time (GPUs, a free port, permission to cap slots) stays for the start.
"""

from pathlib import Path

from ductile.config.on_disk import read_spec
from ductile.config.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, RunConfig, SFTConfig
from ductile.launch.supervise import UNFIT
from ductile.launch.weight_headers import BadWeights, look_at_weights
from ductile.loop.alone import prepare_alone
from ductile.loop.compose import prepare
from ductile.loop.sft import prepare_fake, prepare_sft
from ductile.loop.sinks import need
from ductile.tasks.tokenizer import Tokenizer


def complaint(config: RunConfig) -> str:
    """Why the command would start nothing, in a sentence; "" when it would start. The config has been found good."""
    try:
        _rehearse(config)
    except (*UNFIT, BadWeights) as error:
        return str(error)
    return ""


def _rehearse(config: RunConfig) -> None:
    if isinstance(config, OrchestratorRunConfig):
        prepare_alone(config)
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
    if isinstance(config, InferenceRunConfig):
        _weights(config.model.name)
    else:
        model = config.trainer.model if isinstance(config, RLConfig) else config.model
        _weights(None if model.debug.random_init else model.name)


def _weights(name: str | None) -> None:
    spec = read_spec(name)
    if name is not None and spec is not None:
        look_at_weights(Path(name), spec)
