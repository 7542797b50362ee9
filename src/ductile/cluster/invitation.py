"""How nodes find a run: two files in its folder, for as long as it is at work.

    cluster.json    where the orchestrator is, how many nodes it wants, and the public key of the run
    cluster.key     the secret key, which only the owner can read: who has it can run code on all nodes. It is not
                    written where the run was given its key (`DUCTILE_CLUSTER_KEY`), as its nodes are, too

`ductile join` reads both (`ductile.cluster.join`).
"""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from ductile.disk import write_whole
from ductile.transport.curve import NoKey, RunKey
from ductile.user_files import NotOwn, read_own

MOST_BYTES = 4 << 10
KEY_VARIABLE = "DUCTILE_CLUSTER_KEY"
"""Variable of the environment that has the key: of a node that does not see the run's folder, and of a run that does
not make one itself."""


class NotInvited(Exception):
    """A run cannot be joined. The text is a sentence without its full stop."""


class Invitation(msgspec.Struct, frozen=True):
    """What cluster.json says."""

    address: str
    """host:port at which agents find the orchestrator."""
    num_nodes: int
    """Nodes that the run begins with."""
    max_nodes: int
    public_key: str
    key_is_given: bool = False
    """Whoever started the run gave it the key, and gives it to the nodes."""

    def write(self, folder: Path, key: RunKey) -> None:
        """Write both files, or only cluster.json where the key is given. Raises DiskError."""
        if self.key_is_given:
            key_file(folder).unlink(missing_ok=True)  # one that a run left which was killed
        else:
            write_whole(key_file(folder), key.secret + "\n", mode=0o600)
        write_whole(json_file(folder), msgspec.json.encode(self).decode() + "\n")


def withdraw(folder: Path, address: str) -> None:
    """Remove both files, unless they are of another run by now."""
    with suppress(OSError, NotOwn, msgspec.MsgspecError):
        written = msgspec.json.decode(read_own(json_file(folder), MOST_BYTES), type=Invitation)
        if written.address == address:
            json_file(folder).unlink(missing_ok=True)
            key_file(folder).unlink(missing_ok=True)


def invitation_of(where: str) -> tuple[str, RunKey] | None:
    """Return the address and the key of the run that nodes are to join; None while its folder does not say.

    where: the run's folder, or host:port. Raises NotInvited.
    """
    folder = Path(where)
    if not folder.is_dir() and is_address(where):
        return where, key_of_environment()
    try:
        written = msgspec.json.decode(read_own(json_file(folder), MOST_BYTES), type=Invitation)
        if written.key_is_given:
            key = key_of_environment(f"which the run of {folder} was given: set it to the same key")
        else:
            key = RunKey.of(read_own(key_file(folder), MOST_BYTES, private=True).decode(errors="replace"))
    except FileNotFoundError:
        return None
    except NotOwn as error:
        raise NotInvited(f"{key_file(folder)} or {json_file(folder).name} beside it {error}") from None
    except (NoKey, msgspec.MsgspecError, OSError) as error:
        raise NotInvited(f"{json_file(folder)} and {key_file(folder).name} beside it cannot be used: {error}") from None
    if key.public != written.public_key:
        return None  # the orchestrator is just writing them, or has not begun yet
    return written.address, key


def key_of_environment(
    what_to_do: str = "or it is empty: set it to what is in cluster.key of the run's folder, or write the folder "
    "instead of the address",
) -> RunKey:
    """Return the key that `DUCTILE_CLUSTER_KEY` has. Raises NotInvited."""
    text = os.environ.get(KEY_VARIABLE)
    if not text:
        raise NotInvited(f"the environment has no {KEY_VARIABLE}, {what_to_do}")
    try:
        return RunKey.of(text)
    except NoKey as error:
        raise NotInvited(f"{KEY_VARIABLE} of the environment cannot be used: {error}") from None


def given_key() -> RunKey | None:
    """Return the key that a run is given; None where it makes one itself. Raises NotInvited."""
    return key_of_environment() if os.environ.get(KEY_VARIABLE) else None


def is_address(where: str) -> bool:
    """Return whether a text is host:port."""
    host, _, port = where.rpartition(":")
    return bool(host) and "/" not in where and port.isdigit() and 0 < int(port) < 1 << 16


def json_file(folder: Path) -> Path:
    return folder / "cluster.json"


def key_file(folder: Path) -> Path:
    return folder / "cluster.key"
