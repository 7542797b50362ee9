"""Makes of any machine one whose kernel permits no namespaces: a graders' test puts this folder in PYTHONPATH."""

import ctypes
import errno


class NoNamespaces(ctypes.CDLL):
    def __getattr__(self, name):
        return refused if name == "unshare" else super().__getattr__(name)


def refused(_flags):
    ctypes.set_errno(errno.EPERM)
    return -1


ctypes.CDLL = NoNamespaces
