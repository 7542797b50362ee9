"""Network namespaces as nodes: each has an interface, an address and processes of its own, and reaches the others only
through a bridge.

    with nodes(3) as network:
        agent = network.begin(1, "ductile", "join", ...)      a machine at 10.213.N.2 and its first process
        network.enter(1, agent, "ductile", "status", ...)     another process there
        network.cut(1) ; network.mend(1)                      the cable of node 1
        agent.kill()                                          the end of all processes of the machine at once

A machine has a process namespace too, with a /proc of its own: what a node says of its processes means nothing on
another (`tests.cluster.on_node`). Making them needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN) and `ip`; `nodes` skips the
test where that is not so.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 30.0
PREFIX = "dctl"
NUM_NUMBERS = 250


class Network:
    """Nodes 0 to n-1 behind one bridge."""

    def __init__(self, num_nodes: int, number: int) -> None:
        """number: below NUM_NUMBERS; each may be in use once at a time."""
        self._id = number
        self.num_nodes = num_nodes
        self._bridge = f"{PREFIX}{self._id}"

    def address(self, node: int) -> str:
        return f"10.213.{self._id}.{node + 1}"

    def begin(self, node: int, *words: str, **how: Any) -> "subprocess.Popen[bytes]":
        """Start a module with its arguments as the first process of the node, which all others there end with."""
        return subprocess.Popen([sys.executable, "-m", "tests.cluster.on_node", self._name(node), "0", *words], **how)

    def enter(self, node: int, first: "subprocess.Popen[bytes]", *words: str, **how: Any) -> "subprocess.Popen[bytes]":
        """Start another one beside the first process of the node."""
        pid = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().strip()
        return subprocess.Popen([sys.executable, "-m", "tests.cluster.on_node", self._name(node), pid, *words], **how)

    def cut(self, node: int) -> None:
        """Take the node's cable out: nothing comes through, and nobody is told."""
        ip("link", "set", self._cable(node), "down")

    def mend(self, node: int) -> None:
        ip("link", "set", self._cable(node), "up")

    def make(self) -> None:
        """Raises FileExistsError where a network has this number, which another process may be using."""
        try:
            ip("link", "add", self._bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            if "File exists" in error.stderr:
                raise FileExistsError(self._bridge) from error
            raise
        ip("link", "set", self._bridge, "up")
        for node in range(self.num_nodes):
            name, cable = self._name(node), self._cable(node)
            ip("netns", "add", name)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", cable, "master", self._bridge, "up")
            ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "add", "default", "dev", "eth0")

    def remove(self) -> None:
        for node in range(self.num_nodes):
            with suppress(OSError, subprocess.SubprocessError):
                ip("netns", "del", self._name(node))  # and its cable
        with suppress(OSError, subprocess.SubprocessError):
            ip("link", "del", self._bridge)

    def _name(self, node: int) -> str:
        return f"{PREFIX}{self._id}n{node}"

    def _cable(self, node: int) -> str:
        return f"{PREFIX}{self._id}v{node}"


def ip(*words: str) -> None:
    """Raises OSError or CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=TIMEOUT_S)


@contextmanager
def nodes(num_nodes: int) -> Iterator[Network]:
    """A network of so many nodes, made and removed. Skips the test where this machine does not let it be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2)")
    network = _made(num_nodes)
    try:
        yield network
    finally:
        network.remove()


def _made(num_nodes: int) -> Network:
    for number in range(os.getpid(), os.getpid() + NUM_NUMBERS):
        network = Network(num_nodes, number % NUM_NUMBERS)
        try:
            network.make()
        except FileExistsError:
            continue
        except subprocess.CalledProcessError as error:
            network.remove()
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        return network
    pytest.skip(f"there are {NUM_NUMBERS} networks already, such as {PREFIX}0")
