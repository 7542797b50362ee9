import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ductile.fabric import rendezvous


def test_what_one_sets_another_gets() -> None:
    store = rendezvous.host_store()
    one, other = (rendezvous.connect(f"127.0.0.1:{store.port}", timeout_s=10.0) for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_it_listens_on_loopback_alone() -> None:
    store = rendezvous.host_store()
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    listening += [line.split()[1] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:] if " 0A " in line]
    assert [address for address in listening if address.endswith(f":{store.port:04X}")] == [
        f"0100007F:{store.port:04X}"
    ]


def test_nobody_there_is_an_error_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RuntimeError):
        rendezvous.connect(f"127.0.0.1:{port}", timeout_s=1.0)


def test_a_lasting_connection_is_kept_as_long_as_it_replies() -> None:
    store = rendezvous.host_store()
    address, listening = f"127.0.0.1:{store.port}", (rendezvous.LOOPBACK, store.port)
    one = rendezvous.lasting(address, timeout_s=10.0)
    assert rendezvous.lasting(address, timeout_s=10.0) is one
    del store  # its connections end with it
    again = socket.create_server(listening)
    store = TCPStore(*listening, is_master=True, wait_for_workers=False, master_listen_fd=again.detach())
    store.set("key", "value")
    assert rendezvous.lasting(address, timeout_s=10.0).get("key") == b"value"


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":80", "localhost:x"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="it must be host:port"):
        rendezvous.connect(address, timeout_s=1.0)
