"""A run whose custom function never returns, for tests to interrupt: `python -m tests.orchestrator.endless FOLDER`.

It has trained 7 steps and saved none. It has no slots: what is at stake is the event loop of this process.
"""

import sys

from ductile.config.schema.run import RLConfig
from ductile.orchestrator.ending import interrupt
from ductile.orchestrator.ending.supervise import supervise


def endless():
    print("asked", flush=True)
    while True:
        pass


async def run(config, prepared, session):
    session.record.metrics(7, {})
    endless()


if __name__ == "__main__":
    interrupt.REACTS_S = 1.0
    sys.exit(supervise("rl", RLConfig(output_dir=sys.argv[1]), lambda config: None, lambda prepared: 9, run))
