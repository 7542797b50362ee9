"""How processes make sure that they end with the one they work for, and no sooner. Linux only."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1

SENT_TO_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What Ctrl-C, a batch system and a lost terminal send to every process of a run."""


def leave_signals_to_the_orchestrator() -> None:
    """Ignore what is sent to the whole group: the orchestrator decides when the step is saved and who is to end."""
    for signum in SENT_TO_GROUPS:
        signal.signal(signum, signal.SIG_IGN)


def signal_on_parent_death(parent: int, signum: signal.Signals) -> None:
    """Have the kernel send `signum` to this process when `parent`, the process that forked it, ends.

    SIGKILL also ends a stopped process. The kernel means the parent's *thread*: fork from one that stays. If the
    parent is gone already, this process ends here and now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)
