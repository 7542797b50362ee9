"""How a process ended, in words, with the cause that the machine tells: limit, use, and the kernel's counter."""

import resource
import signal
from pathlib import Path

from ductile.cgroups import PROC, count_in, memory_groups
from ductile.host import memory_now, shared_memory_now


class OomKills:
    """Tells of each process that the kernel killed for lack of memory, once.

    The kernel counts the processes of a control group that it killed, and does not say which they were. So a process
    that ended by SIGKILL is taken for one of them as long as more were counted than told of. Processes of a run are in
    the group of the one that starts them; groups above it count those of others too, and so does the machine, which is
    asked only where no group counts.
    """

    def __init__(self, proc: Path = PROC) -> None:
        """proc: where the kernel tells of processes. What it has counted until now is of no process of ours."""
        self._proc = proc
        _, self._reported = self._count()

    def tell(self, whom: str = "it") -> str:
        """The next kill that nobody was told of, in words; "" where there is none. whom: who was killed."""
        (counter, now), before = self._count(), self._reported
        if now <= before:
            return ""
        self._reported += 1
        took = "may have taken" if counter == self._proc / "vmstat" else "took"
        counted = f"oom_kill of {counter} went from {before} to {now}"
        return f"the kernel's OOM killer {took} {whom}: {counted}; {memory_now(self._proc)}"

    def _count(self) -> tuple[Path, int]:
        for group in memory_groups(self._proc):
            if group.num_killed is not None:
                return group.folder, group.num_killed
        return self._proc / "vmstat", count_in(self._proc / "vmstat", "oom_kill") or 0


OOM_KILLS = OomKills()
"""Those since this process began."""

_FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})


def ending(code: int, cpu_s: float | None = None, logs_faults: bool = False) -> str:
    """ "was killed by SIGKILL (the kernel's OOM killer took it: ...)", "ended with exit code 1". To be asked once for
    each process, when it has ended.

    code: as in subprocess; one above 128 is of a shell, or of who tells of a signal as a shell does. cpu_s: CPU time of
    the process. logs_faults: its log has the line of Python where it broke.
    """
    if code < 0:
        name, cause = _signal(-code), cause_of(-code, cpu_s, logs_faults)
        return f"was killed by {name}{f' ({cause})' if cause else ''}"
    if code - 128 in set(signal.Signals):
        cause = cause_of(code - 128, cpu_s)
        return f"ended with exit code {code} ({_signal(code - 128)}{f': {cause}' if cause else ''})"
    return f"ended with exit code {code}"


def cause_of(signum: int, cpu_s: float | None = None, logs_faults: bool = False) -> str:
    """Return what the machine tells of a process that ended by this signal; "" where it tells nothing."""
    if signum == signal.SIGKILL:
        return _cpu_time(cpu_s) or OOM_KILLS.tell()
    if signum == signal.SIGXCPU:
        return _cpu_time(cpu_s) or "it took more CPU time than it may"
    if signum == signal.SIGBUS:
        return f"memory behind a file was not to be had: {shared_memory_now()}"
    return "its log says where" if logs_faults and signum in _FAULTS else ""


def _cpu_time(cpu_s: float | None) -> str:
    """ "" where the process had not used up what it may take. At the soft limit the kernel sends SIGXCPU and at the
    hard one SIGKILL; `ulimit -t` sets both."""
    allowed_s = min(resource.getrlimit(resource.RLIMIT_CPU), key=lambda limit_s: limit_s % (1 << 64))  # -1: none
    if cpu_s is None or allowed_s == resource.RLIM_INFINITY or cpu_s < allowed_s - 1:
        return ""
    return f"it took {cpu_s:.0f} s of CPU time, and may take {allowed_s} s: ulimit -t"


def _signal(signum: int) -> str:
    """Its name; a real-time signal, say, has none."""
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"
