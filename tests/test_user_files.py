"""Text and paths as people write them, whichever editor and whichever shell they use."""

import os
import re
from pathlib import Path

import pytest

import ductile
from ductile.user_files import BadPath, NotText, expanded, read_text

SOURCE = Path(ductile.__file__).parent


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a\nb\n", "a\nb\n"),
        (b"\xef\xbb\xbfa\r\nb\r", "a\nb\n"),
        ("Zoë → 1".encode(), "Zoë → 1"),
        (b"", ""),
    ],
)
def test_text_is_read_as_it_was_meant(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    assert read_text(tmp_path / "f") == text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"ok\nZo\xeb", "byte 5 (line 2) cannot be read. Save it as UTF-8"),
        (b"\xef\xbb\xbfok\nZo\xeb", "byte 8 (line 2) cannot be read. Save it as UTF-8"),
        ("ok".encode("utf-16"), "byte 0 (line 1) cannot be read (it looks like UTF-16). Save it as UTF-8"),
    ],
)
def test_what_is_no_text_is_told_with_its_place(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(NotText, match=f"^{re.escape(f'{tmp_path}/f is not UTF-8 text: {said}')}$"):
        read_text(tmp_path / "f")


def test_no_file_of_a_user_is_read_in_another_way() -> None:
    """Of the system and of ductile's own are: /proc, and what a run keeps for itself."""
    own = {
        "tasks/keeper.py", "fabric/process.py", "kernels/device.py", "host.py", "cluster/cpu_cap.py",
        "orchestrator/control/control.py", "orchestrator/ending/progress.py", "generator/server/serve.py",
        "config/reading/docs.py", "observe.py", "sim/replay.py", "config/checks/written.py",
        "config/reading/imports.py", "config/checks/reward_signature.py", "user_files.py", "cgroups.py",
        "fleet/registry/authority.py", "generator/compare.py", "generator/server/registrar.py",
        "messages/control_token.py", "dashboard/chrome_trace.py",
        "weights/carriers/disk.py",
        "orchestrator/ending/supervise.py", "orchestrator/commands/sinks.py", "orchestrator/commands/run_meaning.py",
    }  # fmt: skip
    found = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if re.search(r"\.read_text\(|\.read_bytes\(|Tokenizer\.from_file\(", file.read_text(encoding="utf-8"))
    }
    assert found - own == set()


def test_a_home_is_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/zoe")
    assert expanded("~/x") == "/home/zoe/x"
    assert expanded("~") == "/home/zoe"
    assert expanded("~root/x") == os.path.expanduser("~root") + "/x"
    for plain in ("runs/x", "a~b", "/a/~/b", "100%", "50%/x", "$", "a.b:c"):
        assert expanded(plain) == plain


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("$SCRATCH/x", r"has \$SCRATCH in it, .* it stands for \(/scratch/me/x\)"),
        ("/a/${SCRATCH}", r"has \$\{SCRATCH\} in it"),
        ("%SCRATCH%/x", "has %SCRATCH% in it"),
        ("$NOWHERE/x", r"stands for$"),
        ("~nobody-of-this-name/x", r"no such user\. For a file of that name write \./~nobody-of-this-name/x"),
    ],
)
def test_what_only_a_shell_replaces_is_refused(path: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(BadPath, match=said):
        expanded(path)
