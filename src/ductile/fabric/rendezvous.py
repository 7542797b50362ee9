"""The place where ranks find each other: the run's key-value store. One process hosts it, the slots connect.

It binds to loopback unless told otherwise.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from ductile.transport.sockets import LOOPBACK


def host_store(host: str = LOOPBACK, timeout_s: float = 60.0) -> TCPStore:
    """A store in this process, on a free port (`.port`). It lives as long as the object."""
    # TCPStore by itself listens on every interface; a socket that we bind listens where we say.
    listener = socket.create_server((host, 0))
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect(address: str, timeout_s: float) -> Store:
    """The store at `host:port`; waits at most `timeout_s` for it and in every later `get` and `wait`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the rendezvous address is {address!r}; it must be host:port")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


_lasting: dict[str, Store] = {}


def lasting(address: str, timeout_s: float) -> Store:
    """The connection that this process keeps for what it does again and again, by one thread at a time.

    torch asks for the name of every address that it connects to, and where DNS does not reply that takes seconds.
    """
    store = _lasting.get(address)
    if store is None or not _is_reachable(store):
        store = _lasting[address] = connect(address, timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _is_reachable(store: Store) -> bool:
    try:
        store.check(["anything"])
    except RuntimeError:
        return False
    return True


def forget(store: Store, prefix: str) -> None:
    """Delete all keys that begin with `prefix`."""
    for key in store.list_keys():
        if key.startswith(prefix):
            store.delete_key(key)
