"""Keys that open doors: where they come from, and how they stay out of what is printed and written."""

import os
import re
from collections.abc import Mapping, Sequence

SECRETS = frozenset({"api_key"})
"""Keys whose values are neither shown nor written."""

_NAMES = "|".join(SECRETS)
_IN_TABLE = re.compile(rf"""(["']?(?:{_NAMES})["']?\s*[:=]\s*)("(?:[^"\\]|\\.)*"|'[^']*'|[^\s,}}]+)""")
_USERINFO = re.compile(r"(?<=://)[^/?#\s\"']*@")


def without_userinfo(text: str) -> str:
    """`http://user:password@host` as `http://***@host`."""
    return _USERINFO.sub("***@", text)


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with `***` for the value of every secret: `--client.api-key ***`."""
    shown: list[str] = []
    is_secret = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if is_secret:
            shown.append("***")
        elif equals and _names_secret(flag):
            shown.append(f"{flag}=***")
        else:
            shown.append(without_userinfo(_IN_TABLE.sub(r"\1***", word)))
        is_secret = not is_secret and not equals and _names_secret(word)
    return shown


def secret_of(given: str | None, variable: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The secret as it was given, or the environment variable's value; None without either."""
    return given if given is not None or variable is None else environment.get(variable)


def has_userinfo(url: str) -> bool:
    return _USERINFO.search(url) is not None


def _names_secret(word: str) -> bool:
    return word.startswith("--") and word.rpartition(".")[2].lstrip("-").replace("-", "_") in SECRETS
