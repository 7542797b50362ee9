"""What of a layout the trainer cannot have yet."""

from collections.abc import Mapping

from ductile.config.model import TrainerModelConfig
from ductile.config.schema import keys


def unbuilt(model: Mapping[str, object]) -> str:
    """Why the trainer refuses these keys of `trainer.model`: sentences. Empty where it does not."""
    known = keys(TrainerModelConfig)
    marks = {name: known[name].not_built for name in model}
    return " ".join(f"trainer.model.{name} = {model[name]}. {mark.sentence()}" for name, mark in marks.items() if mark)
