"""`python -m tests.warm_echo`: a process that says as JSON what it began with, for `tests/test_warm.py`.

With `again` it says what a process of its own says, with `exec` what it becomes; with a number it ends with that code.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def main(words: list[str]) -> int:
    rest = [sys.executable, "-m", "tests.warm_echo", *words[1:]]
    if words[:1] == ["again"]:
        return subprocess.run(rest, check=False).returncode
    if words[:1] == ["exec"]:
        os.execv(sys.executable, rest)
    listed = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    began = {
        "torch": "torch" in sys.modules,
        "arguments": sys.argv[1:],
        "command": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "environment": os.environ.get("DUCTILE_ECHO"),
        "shown": f"DUCTILE_ECHO={os.environ.get('DUCTILE_ECHO')}" in Path("/proc/self/environ").read_text().split("\0"),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "leads_session": os.getsid(0) == os.getpid(),
        "descriptors": [fd for fd in listed if Path(f"/proc/self/fd/{fd}").exists()],
        "input": sys.stdin.read(),
    }
    print(json.dumps(began))
    return int(words[0]) if words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
