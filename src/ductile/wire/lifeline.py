"""How processes make sure that they do not outlive the one they work for. Linux only."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


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
