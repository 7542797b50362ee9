"""Writing the trainer's model as a Hugging Face folder whose files the slots share.

    first slot     begins the folder: config, tokenizer, index
    all slots      gather the parameters, one at a time; each slot writes the files that are dealt to it
    first slot     gives the folder its name, if all have written theirs

No slot ever holds more than one whole parameter, and none writes more than its files. That saves memory and no time:
while one slot writes a parameter, the others wait with the next. A slot that cannot write still helps to gather, so
that all slots stay in step.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ductile.config.checks.weight_headers import ModelFolderError
from ductile.core.layout.model.parameters import is_adapter
from ductile.core.layout.model.spec import SpecError
from ductile.model.adapters import merged
from ductile.model.checkpoint import (
    MAX_SHARD_BYTES,
    begin_folder,
    discard_folder,
    dtype_named,
    finish_folder,
    stored_dtype,
    unfinished,
    write_weights,
)
from ductile.records import AS_IN_SOURCE, ChatFormat
from ductile.trainer.adapter_folder import ADAPTER_FOLDER, write_adapter
from ductile.trainer.trainer import Trainer


class FolderNotWritten(Exception):
    """The folder cannot be written. All slots are in step, and the trainer is as it was."""


def export_model(
    trainer: Trainer,
    path: str,
    named_dtype: str,
    chat_format: ChatFormat = AS_IN_SOURCE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the folder `path`, which appears whole or not at all; collective. Adapters are folded into its weights, and
    lie in its folder `adapter` in PEFT's form besides. `named_dtype`: "auto" is that of the
    folder's weights that the model came from.

    Raises FolderNotWritten on each slot that cannot write its files, once all slots are through; the others return, and
    there is no folder.
    """
    source, context, spec = Path(trainer.config.model.name or ""), trainer.context, trainer.spec
    adapters = dict[str, Tensor]()
    slots, dtype = context.layout.slots, trainer.precision.parameters

    def begin() -> None:
        nonlocal dtype
        wanted = stored_dtype(source) if named_dtype == "auto" else dtype_named(named_dtype)
        dtype = wanted or dtype
        if context.is_first:
            begin_folder(path, spec.base, source, dtype, max_shard_bytes, chat_format)

    def kept(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Note the adapters on their way, on the first slot."""
        for name, tensor in named:
            if context.is_first and is_adapter(name):
                adapters[name] = tensor.clone()
            yield name, tensor

    def write() -> None:
        named = trainer.export_weights(dtype if spec.lora is None else trainer.precision.parameters)
        try:
            tensors = (tensor for _, tensor in merged(spec, kept(named)))
            write_weights(path, spec.base, tensors, dtype, max_shard_bytes, slots.index(context.slot), len(slots))
        finally:
            for _ in named:  # the other slots gather to the end
                pass

    def finish() -> None:
        if context.is_first:
            if adapters:
                write_adapter(unfinished(path) / ADAPTER_FOLDER, spec, adapters, trainer.precision.parameters, source)
            finish_folder(path)

    try:
        all(_by_all(step, trainer) for step in (begin, write, finish))  # no step after one that a slot could not do
    finally:
        if context.is_first:
            discard_folder(path)


def _by_all(step: Callable[[], None], trainer: Trainer) -> bool:
    """Take a step that may fail on one slot alone: it fails there, and the others learn that it did."""
    failure: Exception | None = None
    try:
        step()
    except (OSError, ModelFolderError, SpecError) as error:  # all else is of the slots' work together
        failure = error
    num_failed = trainer.context.sum(torch.tensor(float(failure is not None), device=trainer.device))
    if failure is not None:
        raise FolderNotWritten(str(failure)) from failure
    return not num_failed.item()
