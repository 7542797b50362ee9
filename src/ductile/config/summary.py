"""What `ductile check` says: what a run would do, and where each derived value comes from."""

from collections.abc import Iterator

from ductile.config.errors import dotted, show
from ductile.config.parse import Parsed
from ductile.config.preflight import read_model_spec
from ductile.config.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, RunConfig, SFTConfig
from ductile.config.slots import placement_of


def summary(parsed: Parsed[RunConfig], command: str) -> str:
    """Some lines for a person. The config has been found good."""
    config = parsed.config
    rows: list[tuple[str, str]] = [
        ("config", " < ".join([*parsed.files, "flags"] if parsed.has_flags else parsed.files) or "defaults"),
        ("model", _model(config)),
        ("output", config.output_dir),
        *_work(config),
        *_slots(config),
        *(("derived" if index == 0 else "", text) for index, text in enumerate(_derived(parsed))),
    ]
    return "\n".join([f"ductile {command}: the config is good.", "", *(f"  {name:<10}{text}" for name, text in rows)])
