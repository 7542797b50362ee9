"""How processes make sure that they end with the one they work for, and no sooner.

For Linux, and of nothing but the standard library: small processes import it before they become what they are for.
"""

import ctypes
import os
import select
import signal

_PR_SET_PDEATHSIG = 1

SENT_TO_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What Ctrl-C, a batch system and a lost terminal send to every process of a run."""


def leave_signals_to_the_orchestrator() -> None:
    """Ignore what is sent to the whole group: the orchestrator decides when the step is saved and who is to end."""
    for signum in SENT_TO_GROUPS:
        signal.signal(signum, signal.SIG_IGN)


def signal_on_parent_death(parent: int, signum: signal.Signals) -> None:
    """Have the kernel send `signum` to this process when `parent`, the process that started it, ends.

    SIGKILL also ends a stopped process. The kernel means the parent's *thread*: fork from one that stays. If the
    parent is gone already, this process ends here and now.
    """
    prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def fork_tied(ends_by: signal.Signals) -> int:
    """Forks as `os.fork` does; the child is sent `ends_by` when this process ends, however early that is.

    A child that is born into a process namespace does not see its parent there, so it looks at the parent's pidfd.
    """
    parent = os.pidfd_open(os.getpid())
    child = os.fork()
    if not child:
        prctl(_PR_SET_PDEATHSIG, ends_by)
        if select.select([parent], [], [], 0)[0]:
            os._exit(1)
    os.close(parent)
    return child


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
