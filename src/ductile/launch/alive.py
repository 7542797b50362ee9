"""Whether a process is still the one that somebody wrote down: numbers come again, start times do not."""

from pathlib import Path


def start_time(pid: int) -> int | None:
    """Start time of a process, in clock ticks since the machine started; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
