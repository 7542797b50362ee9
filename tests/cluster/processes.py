"""Finding the processes of a run, as somebody outside would."""

import os
from pathlib import Path


def processes_with(variable: str) -> dict[int, str]:
    """Live processes (zombies not counted) that carry `NAME=value` in their environment: pid to command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if variable.encode() in environment and is_running(int(folder.name)):
            found[int(folder.name)] = command
    return found


def is_running(pid: int) -> bool:
    """False for a zombie, too: nobody but its parent has anything left of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int | None:
    """None when the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def waits_for(pid: int) -> str:
    """The kernel's function in which the process waits; "" when it has ended, "0" when it runs."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""
