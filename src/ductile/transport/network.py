"""Addresses and interfaces of this machine, for sockets that other machines reach."""

import ctypes
import fcntl
import ipaddress
import socket
import struct

_SIOCGIFCONF = 0x8912
"""Asks the kernel for the IPv4 addresses of all interfaces (netdevice(7))."""
_ROW_BYTES, _NAME_BYTES = 40, 16
_MOST_ROWS = 256
_FAR = ("192.0.2.1", 9)
"""An address that belongs to nobody (RFC 5737): the route to it is the one to other machines."""


class NoSuchInterface(ValueError):
    """A name or an address that no interface of this machine has. The text is a sentence's end: "is no ..."."""


def interfaces() -> list[tuple[str, str]]:
    """Return the IPv4 addresses of this machine with the interface of each: [("lo", "127.0.0.1"), ...]."""
    buffer = ctypes.create_string_buffer(_ROW_BYTES * _MOST_ROWS)
    given = struct.pack("iP", len(buffer), ctypes.addressof(buffer))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        size, _ = struct.unpack("iP", fcntl.ioctl(asked, _SIOCGIFCONF, given))
    rows, found = buffer.raw, list[tuple[str, str]]()
    for at in range(0, size, _ROW_BYTES):
        name = rows[at : at + _NAME_BYTES].split(b"\0", 1)[0].decode()
        found.append((name.partition(":")[0], socket.inet_ntoa(rows[at + 20 : at + 24])))
    return found


def address_of(interface: str) -> str:
    """Return the address of `cluster.interface`: the name of an interface, or an address that one of them has. Raises
    NoSuchInterface."""
    known = interfaces()
    try:
        asked = ipaddress.ip_address(interface)
    except ValueError:
        for name, address in known:
            if name == interface:
                return address
    else:
        if asked.is_loopback or any(address == interface for _, address in known):
            return interface
    there = ", ".join(f"{name} ({address})" for name, address in known) or "none"
    raise NoSuchInterface(
        f"{interface!r} is no interface of {socket.gethostname()} with an IPv4 address; it has {there}"
    )


def interface_of(address: str) -> str:
    """Return the name of the interface that has the address; "" where none has it."""
    if ipaddress.ip_address(address).is_loopback:
        address = "127.0.0.1"  # its interface has all that begin with 127
    return next((name for name, its_address in interfaces() if its_address == address), "")


def address_towards(host: str = "", port: int = 1) -> str:
    """Return the address of this machine that those at `host` reach; "" for any other machine. Raises OSError where
    no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port) if host else _FAR)  # sends nothing: the kernel only looks the route up
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches the address."""
    return ipaddress.ip_address(address).is_loopback
