"""Files that people name and write: what a path means, the text behind it, and whose it is."""

import os
import re
import stat
from pathlib import Path

UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})|%([A-Za-z_]\w*)%")


class NotText(ValueError):
    """A file is no UTF-8 text. `str()` is a sentence with its path, and `why` the rest of one about it."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{file} {why}")
        self.why = why


class BadPath(ValueError):
    """A path that means something else here than in a shell. The text goes on after it."""


class NotOwn(ValueError):
    """A file is none of this user's. The text goes on after its name."""


def read_own(file: Path, most_bytes: int, private: bool = False) -> bytes:
    """Content of a file of this user's, up to one byte more than `most_bytes`. private: nobody else may read it.

    Raises OSError, and NotOwn for a link, a pipe or somebody else's file.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotOwn("is no file")
        if status.st_uid != os.geteuid():
            raise NotOwn(f"belongs to user {status.st_uid}, and not to {os.geteuid()}, who runs this")
        if private and status.st_mode & 0o077:
            raise NotOwn("can be read by others")
        return stream.read(most_bytes + 1)


def read_text(file: Path) -> str:
    """Text of a file that people write, or programs of theirs: UTF-8, with a byte-order mark before it or without one,
    and line ends of any system, which become `\\n`.

    Raises OSError, and NotText with the place of the first byte that is wrong.
    """
    content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Without the mark, which the error does not count.
        at = error.start + 3 * content.startswith(b"\xef\xbb\xbf")
        line = content[:at].count(b"\n") + 1
        looks = " (it looks like UTF-16)" if content[:2] in UTF_16_MARKS else ""
        why = f"is not UTF-8 text: byte {at} (line {line}) cannot be read{looks}. Save it as UTF-8"
        raise NotText(file, why) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def expanded(path: str) -> str:
    """`~/x` and `~name/x` as the path that they mean; every other one as it is.

    Raises BadPath for a variable, as in `$SCRATCH/x`: a folder would be made that has the name of the variable.
    """
    if (found := _VARIABLE.search(path)) is not None:
        name = (found[1] or found[2]).strip("{}")
        value = os.environ.get(name, "")
        means = f" ({path.replace(found[0], value)})" if value.startswith("/") else ""
        raise BadPath(f"has {found[0]} in it, which only a shell replaces. Write the path that it stands for{means}")
    full = os.path.expanduser(path)
    if path.startswith("~") and full.startswith("~"):
        user = path.partition("/")[0]
        raise BadPath(f"begins with {user}, and there is no such user. For a file of that name write ./{path}")
    return full
