"""Sockets that processes have open, as the kernel lists them in /proc."""

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

Address = tuple[str, int]
LISTENS, UNCONNECTED_UDP, ACCEPTS_ON_UNIX = "0A", "07", "00010000"


@dataclass(frozen=True)
class OpenSocket:
    """A socket of the internet that a process has open."""

    pid: int
    inode: str
    protocol: str
    """ "tcp", "tcp6", "udp" or "udp6"."""
    state: str
    here: Address
    there: Address


def open_sockets(pids: Iterable[int]) -> Iterator[OpenSocket]:
    """Yield what these processes have open. Those that have ended have nothing."""
    for pid in pids:
        inodes = inodes_of(pid)
        for protocol in ("tcp", "tcp6", "udp", "udp6"):
            for fields in _rows(pid, protocol):
                if fields[9] in inodes:
                    here, there = _address(fields[1]), _address(fields[2])
                    yield OpenSocket(pid, fields[9], protocol, fields[3], here, there)


def listening(pids: Iterable[int]) -> dict[Address, set[int]]:
    """Return where anybody may connect to one of these processes, or send it a datagram, with the processes that have
    the socket."""
    found = defaultdict[Address, set[int]](set)
    for each in open_sockets(pids):
        if each.state == LISTENS or (each.protocol.startswith("udp") and each.state == UNCONNECTED_UDP):
            found[each.here].add(each.pid)
    return dict(found)


def listening_on_unix(pids: Iterable[int]) -> set[str]:
    """Return the paths at which these processes take connections; "@name" is one that has no file."""
    found = set[str]()
    for pid in pids:
        inodes = inodes_of(pid)
        for fields in _rows(pid, "unix"):
            if fields[3] == ACCEPTS_ON_UNIX and fields[6] in inodes:
                found.add(fields[7] if len(fields) > 7 else "")
    return found


def inodes_of(pid: int) -> set[str]:
    """Return the sockets of a process by their numbers in the kernel's tables."""
    found = set[str]()
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it was closed just now
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def memory_bytes(pid: int) -> int:
    """Return the most memory that the process has had since `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc/{pid}/status says nothing of its memory")


def forget_peak(pid: int) -> None:
    """Have the process's peak of memory be what it has now."""
    with suppress(OSError):  # a kernel without it goes on from the peak that there was
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _rows(pid: int, table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    except OSError:
        return []


def _address(text: str) -> Address:
    """Return the address that is written as the kernel does: 0100007F:1F90 is 127.0.0.1, port 8080."""
    host, _, port = text.partition(":")
    words = [struct.pack("<I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)
