"""The token of a server's control routes, in a file that only its user can read, for as long as the server lives.

$XDG_RUNTIME_DIR/ductile/servers/<host>-<port>.json, or below ~/.cache
"""

import os
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from urllib.parse import urlsplit

import msgspec

from ductile.disk import write_whole
from ductile.user_files import NotOwn, read_own

MOST_BYTES = 16 << 10
"""Largest token file that is read."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A secret that whoever gives a server weights must know. It is shown nowhere but in its file."""

    text: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    file: Path | None = None


class _TokenFile(msgspec.Struct):
    host: str
    port: int
    pid: int
    token: str


class UnsafeFolder(ValueError):
    """The folder for tokens is not the user's alone. The text is a sentence with its path."""


def token_file(host: str, port: int) -> Path:
    """Return where the server that listens there keeps its token."""
    root = os.environ.get("XDG_RUNTIME_DIR") or str(Path.home() / ".cache")
    return Path(root) / "ductile" / "servers" / f"{host.replace(':', '_')}-{port}.json"


@contextmanager
def control_token(host: str, port: int) -> Generator[ControlToken]:
    """Make a new token, which is in the file until the end. Where no file can be written the server goes on, and nobody
    can give it weights. Raises `UnsafeFolder`."""
    file = token_file(host, port)
    token = ControlToken(file=file)
    content = msgspec.json.encode(_TokenFile(host, port, os.getpid(), token.text)).decode()
    try:
        file.parents[2].mkdir(parents=True, exist_ok=True)
        for folder in (file.parents[1], file.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if not S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise UnsafeFolder(
                    f"{folder} can be written by others, who could put tokens of their own there: chmod 700 {folder}"
                )
        write_whole(file, f"{content}\n", mode=0o600)
    except OSError as why:
        print(f"ductile inference: no token of the control routes can be kept: {why}", file=sys.stderr)
        token = ControlToken()
    try:
        yield token
    finally:
        with suppress(OSError):
            if token.text in file.read_text("utf-8"):  # a later server on the same port has written its own
                file.unlink()


def token_of(url: str, file: str = "") -> str | None:
    """Return the token of the server at `url`: from the file that its lease names, else from where this user's servers
    on this machine keep theirs. None where there is no token file of this user's alone, made by a server at that very
    host and port: a lease may come from anywhere, and nothing else is read and sent to it."""
    parts = urlsplit(url)
    names = ("127.0.0.1", "::1") if parts.hostname == "localhost" else (parts.hostname or "",)
    files = [*([Path(file)] if file else []), *(token_file(name, parts.port or 0) for name in names)]
    return next(
        (found.token for each in files if (found := _read(each)) and found.host in names and found.port == parts.port),
        None,
    )


def _read(file: Path) -> _TokenFile | None:
    try:
        return msgspec.json.decode(read_own(file, MOST_BYTES, private=True), type=_TokenFile)
    except (NotOwn, OSError, msgspec.DecodeError):
        return None
