"""Who can reach a run's sockets, and what becomes of their folder."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from ductile.transport.dealer import Dealer
from ductile.transport.mailbox import Mailbox
from ductile.transport.router import Router
from ductile.transport.sockets import MAX_PATH_BYTES, SocketFolder
from tests.transport.test_router import HELLO
from tests.transport.transports import TOKEN, eventually

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
NOBODY = 65534


def test_slots_of_the_same_user_are_heard():
    async def story():
        folder = SocketFolder()
        router = Router(TOKEN, folder.address)
        mailbox = Mailbox(router)
        dealer = Dealer(router.address, TOKEN, 0)
        dealer.send(HELLO)
        await eventually(lambda: 0 in mailbox.heard_at_s)
        dealer.close()
        await router.close()
        folder.remove()
        assert not folder.path.exists()

    asyncio.run(asyncio.wait_for(story(), 100))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_does_not_even_connect():
    async def story():
        folder = SocketFolder(["/tmp"])
        router = Router(TOKEN, folder.address)
        path = router.address.removeprefix("ipc://")
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        os.chmod(path, 0o777)  # the folder alone keeps strangers out
        # Its libraries may lie where nobody may look: it starts as root, and becomes nobody then.
        become = f"import os, socket; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); "
        command = [sys.executable, "-c", become + CONNECT, path]
        stranger = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
        assert "PermissionError" in stranger.stderr
        await router.close()
        folder.remove()

    asyncio.run(asyncio.wait_for(story(), 100))


def test_no_port_is_open():
    async def story():
        before = listening()  # other tests of this process may have left a group's sockets to the garbage collector
        folder = SocketFolder()
        router = Router(TOKEN, folder.address)
        assert listening() <= before
        await router.close()
        folder.remove()

    asyncio.run(asyncio.wait_for(story(), 100))


def listening() -> set[str]:
    """This process's TCP sockets that wait for connections."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    waiting = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"}
    own = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return waiting & {os.readlink(fd) for fd in own if os.path.lexists(fd)}


def test_a_name_that_is_too_long_for_a_socket_is_passed_over(tmp_path: Path):
    long = tmp_path / ("x" * MAX_PATH_BYTES)
    long.mkdir()
    folder = SocketFolder([str(long), "/nowhere", "/tmp"])
    assert folder.path.parent == Path("/tmp")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(folder.address)
    folder.remove()
    with pytest.raises(OSError, match="none of /nowhere is there"):
        SocketFolder(["/nowhere"])


def test_the_longest_name_that_fits_can_be_bound(tmp_path: Path):
    room = MAX_PATH_BYTES - len("/ductile-sockets-12345678/slots") - len(str(tmp_path)) - 1
    parent = tmp_path / ("x" * room)
    parent.mkdir()
    folder = SocketFolder([str(parent)])
    assert len(folder.address.removeprefix("ipc://")) == MAX_PATH_BYTES
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(folder.address.removeprefix("ipc://"))


def test_what_a_killed_run_left_is_swept_and_a_live_one_stays(tmp_path: Path):
    leave = f"from ductile.transport.sockets import SocketFolder; print(SocketFolder([{str(tmp_path)!r}]).path)"
    left = subprocess.run([sys.executable, "-c", leave], capture_output=True, text=True, timeout=30, check=True)
    alive = SocketFolder([str(tmp_path)])
    assert not Path(left.stdout.strip()).exists()
    (tmp_path / "ductile-of-somebody-else").mkdir()
    later = SocketFolder([str(tmp_path)])
    assert alive.path.exists()
    assert (tmp_path / "ductile-of-somebody-else").exists()
    alive.remove()
    later.remove()


@pytest.mark.parametrize("prefix", ["ductile-", "ductile-sockets-"])
def test_a_folder_of_the_user_s_own_stays_whatever_it_is_called(tmp_path, prefix):
    theirs = tmp_path / f"{prefix}paper"
    (theirs / "results").mkdir(parents=True)
    theirs.chmod(0o700)
    for name in ("lock", "results/model.safetensors"):
        (theirs / name).write_text("weights")
    folder = SocketFolder([str(tmp_path)])
    (folder.path / "theirs").touch()
    folder.remove()
    assert (theirs / "lock").exists()
    assert (theirs / "results/model.safetensors").exists()
    assert (folder.path / "theirs").exists()
