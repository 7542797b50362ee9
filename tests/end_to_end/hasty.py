"""ductile, which waits for a second and not for ten until it gives up an event loop that hears of no press."""

from ductile import cli
from ductile.orchestrator.ending import interrupt

if __name__ == "__main__":
    interrupt.REACTS_S = 1.0
    raise SystemExit(cli.main())
