"""Requirements of a run that a server must meet before it joins."""

from dataclasses import dataclass

from ductile.messages.updates import ServerState


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements of a run. Each default is met by every server."""

    models: tuple[str, ...] = ()
    """Fingerprints (`ServerState.model`) of which a server must have one."""
    model_name: str = ""
    """Name of the run's model, for sentences."""
    max_model_len: int = 0
    """Tokens that a prompt and its completion may have together."""
    length_key: str = "inference.model.max_model_len"
    """Key of the run that says so."""

    def unmet(self, address: str, state: ServerState) -> str:
        """Return why the server cannot join, a sentence; "" when it can."""
        if self.models and state.model not in ("", *self.models):
            theirs, ours = state.model_name or state.model, self.model_name or self.models[0]
            same = ", which has other tensors under that name," if theirs == ours else ""
            return (
                f"{address} has another model ({theirs}) than the run ({ours}){same}: names, shapes or dtypes of their "
                f"tensors differ, or alpha or targets of their adapters (fingerprints {state.model} and "
                f"{self.models[0]}). Start it with the run's"
            )
        if 0 < state.max_model_len < self.max_model_len:
            return (
                f"{address} takes sequences of {state.max_model_len} tokens at most, and the run's have up to "
                f"{self.max_model_len} ({self.length_key}): start it with --model.max-model-len {self.max_model_len}"
            )
        return ""
