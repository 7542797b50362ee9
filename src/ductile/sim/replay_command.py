"""`ductile replay runs/x`: does the scheduler decide as it did in the run?"""

import argparse
import json
from collections.abc import Sequence

from ductile.config.reading.command_line import parse_with_folder, print_error

EQUAL, DIFFERENT, NOTHING = 0, 1, 2


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="ductile replay",
        description="Make every decision of a run's scheduler again, and say where one is not what it was.",
    )
    asked = parse_with_folder(parser, words)
    # Help comes at once: policies are loaded when there is something to ask them.
    from ductile.config.reading.imports import ImportPathError
    from ductile.dashboard.printable import printable
    from ductile.sim.replay import replay_run

    try:
        replayed = replay_run(asked.run)
    except BrokenPipeError:  # of `| head`: no reader is left
        raise
    except (ImportPathError, OSError, ValueError) as error:
        print_error("replay", error)
        return NOTHING
    print(printable(replayed.sentence))
    if (found := replayed.difference) is None:
        return EQUAL
    for name, outcome in (("recorded", found.recorded), ("replayed", found.replayed)):
        print(f"{name}: {json.dumps(outcome)}")
    return DIFFERENT
