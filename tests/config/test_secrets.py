"""A key that opens a door is in no file and in no sentence."""

import sys
from pathlib import Path

import pytest

from ductile import cli
from ductile.config.schema.secrets import secret_of, without_secrets
from tests.config.stories import furnish

COMMAND = ["--model.name", "model", "--client.base-url", "http://localhost:8000/v1"]
COMMAND += ["--task.type", "builtin", "--task.name", "addition"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--client.api-key", "sk-1", "--seed", "3"], ["--client.api-key", "***", "--seed", "3"]),
        (["--orchestrator.client.api_key=sk-1"], ["--orchestrator.client.api_key=***"]),
        (["--server.api-key", "--api-key"], ["--server.api-key", "***"]),
        (["--client", '{"api_key": "sk \\"1", "timeout_s": 3}'], ["--client", '{"api_key": ***, "timeout_s": 3}']),
        (["--client", "{api_key=sk-1}"], ["--client", "{api_key=***}"]),
        (["--client.base-url", "http://me:sk-1@host/v1"], ["--client.base-url", "http://***@host/v1"]),
        (["--client.api-key-var", "MY_KEY"], ["--client.api-key-var", "MY_KEY"]),
    ],
)
def test_what_is_shown_of_a_command_line(words: list[str], shown: list[str]) -> None:
    assert without_secrets(words) == shown


def test_who_writes_the_command_line_down_finds_no_secret(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "ductile.orchestrator.commands.run.run_orchestrator", lambda config: seen.append(list(sys.argv)) or 0
    )
    monkeypatch.setattr(sys, "argv", ["ductile", "orchestrator", *COMMAND, "--client.api-key", "sk-1"])
    assert cli.main() == 0
    assert "--client.api-key" in seen[0]
    assert "sk-1" not in str(seen)


def test_a_url_with_a_password_is_refused_and_not_repeated(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["orchestrator", *COMMAND, "--client.base-url", "http://me:sk-1@host/v1", "--dry-run"]
    assert cli.main(command) == 2
    said = capsys.readouterr()
    assert '--client.base-url = ["http://***@host/v1"]' in said.err
    assert "sk-1" not in said.out + said.err
    assert not [file for file in here.rglob("*") if file.is_file() and b"sk-1" in file.read_bytes()]


def test_a_key_from_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["orchestrator", *COMMAND, "--client.api-key-var", "DUCTILE_TEST_KEY", "--dry-run"]
    monkeypatch.delenv("DUCTILE_TEST_KEY", raising=False)
    assert cli.main(command) == 2
    assert "names an environment variable that is not set: export DUCTILE_TEST_KEY=" in capsys.readouterr().err
    monkeypatch.setenv("DUCTILE_TEST_KEY", "sk-1")
    assert cli.main(command) == 0
    (written,) = here.rglob("config.toml")
    assert 'api_key_var = "DUCTILE_TEST_KEY"' in written.read_text()
    assert "sk-1" not in written.read_text()
    assert secret_of(None, "DUCTILE_TEST_KEY") == "sk-1"
    assert cli.main([*command, "--client.api-key", "sk-2"]) == 2
    assert "contradicts client.api_key" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "1234567"])
def test_a_servers_key_that_can_be_guessed_is_refused(
    here: Path, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["inference", "--model.name", "model", "--dry-run"]
    assert cli.main([*command, "--server.api-key", key]) == 2
    assert "must be a key of at least 8 characters" in capsys.readouterr().err
    monkeypatch.setenv("DUCTILE_TEST_KEY", key)
    assert cli.main([*command, "--server.api-key-var", "DUCTILE_TEST_KEY"]) == 2
    expected = "must name an environment variable with a key of at least 8" if key else "variable that is not set"
    assert expected in capsys.readouterr().err
    monkeypatch.setenv("DUCTILE_TEST_KEY", "12345678")
    assert cli.main([*command, "--server.api-key-var", "DUCTILE_TEST_KEY"]) == 0
