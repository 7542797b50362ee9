"""`ductile simulate @ sim.toml`: compare ways to use the slots, in virtual time."""

import sys
from collections.abc import Sequence

from ductile.config.reading.errors import ConfigError
from ductile.config.reading.help import help_text
from ductile.config.reading.parse import parse
from ductile.config.schema.simulate import SimulateConfig

BAD_CONFIG = 2


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    at = next((index for index, word in enumerate(words) if word in ("-h", "--help")), None)
    if at is not None:
        about = "which way to use the slots is the fastest? in virtual time"
        print(help_text("simulate", about, SimulateConfig, words[at + 1] if at + 1 < len(words) else ""))
        return 0
    try:
        config = parse(SimulateConfig, words).config
    except ConfigError as error:
        print(f"ductile simulate: {error}", file=sys.stderr)
        return BAD_CONFIG
    # Help and refusals come at once: what simulates is loaded when there is something to simulate.
    from ductile.config.reading.imports import ImportPathError
    from ductile.elastic.policy_decision import BadDecision
    from ductile.sim.compare import compare

    try:
        compare(config)
    except BrokenPipeError:  # of `| head`: no reader is left
        raise
    except (ImportPathError, BadDecision, OSError, ValueError) as error:
        print(f"ductile simulate: {error}", file=sys.stderr)
        return BAD_CONFIG
    return 0
