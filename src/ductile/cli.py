"""The command line: `ductile rl @ run.toml --max-steps 100`.

Nothing heavy is imported before the config is known to be good: `--help` and every refusal of a config come at once;
`check` prepares the run, too. None of them loads torch.
"""

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeGuard

from ductile import __version__
from ductile.config.reading.command_line import as_sentence, pasteable
from ductile.config.reading.errors import ConfigError, did_you_mean
from ductile.config.reading.parse import Parsed, parse
from ductile.config.schema.run import (
    CommandConfig,
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RouterRunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from ductile.config.schema.secrets import without_secrets
from ductile.surrogates import accept_any_text

BAD_CONFIG = 2
"""Exit status when nothing was started because the command line or a config is wrong."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    name: str
    summary: str
    root: type[CommandConfig]


COMMANDS = {
    command.name: command
    for command in (
        CommandEntry("rl", "train with RL: the whole loop", RLConfig),
        CommandEntry("sft", "supervised fine-tuning, with the same trainer", SFTConfig),
        CommandEntry("trainer", "the trainer alone, on fake data", TrainerRunConfig),
        CommandEntry("orchestrator", "rollouts and rewards against a running server", OrchestratorRunConfig),
        CommandEntry("inference", "an OpenAI-compatible server, or several behind a router", InferenceRunConfig),
        CommandEntry(
            "router", "one address before servers that are there: --urls http://10.0.0.7:8000", RouterRunConfig
        ),
    )
}
TOOLS = {
    "join": "ductile.cluster.join_command:main",
    "compare": "ductile.orchestrator.commands.compare:main",
    "resize": "ductile.orchestrator.control.run_commands:resize",
    "drain": "ductile.orchestrator.control.run_commands:drain",
    "status": "ductile.orchestrator.control.run_commands:status",
    "fleet": "ductile.orchestrator.control.run_commands:fleet",
    "simulate": "ductile.sim.command:main",
    "plan": "ductile.sim.plan_command:main",
    "fit": "ductile.sim.fit_command:main",
    "replay": "ductile.sim.replay_command:main",
    "report": "ductile.dashboard.report_command:main",
}
"""Commands without a config of their own: they join a run or ask one which is at work, read what one has written down,
or reckon; `compare` loads both models into a process of its own."""

OVERVIEW = f"""ductile {__version__}: elastic RL post-training

  ductile <command> @ run.toml [@ more.toml] [--key value ...]

{chr(10).join(f"  {command.name:14}{command.summary}" for command in COMMANDS.values())}
  check         is a config good? says what it would do: ductile check [rl] @ run.toml
  compare       do generator and trainer say the same? ductile compare @ run.toml --prompts prompts.jsonl
  join          make this machine a node of a run: ductile join runs/x
  resize        change the slots that a live run trains on: ductile resize runs/x --train 0-3
  drain         empty slots that will be gone, without a loss: ductile drain runs/x --slot 3 --deadline-s 120
  status        what a live run does, slot by slot: ductile status runs/x
  fleet         the servers of a live run, and have them come and go: ductile fleet runs/x join http://host:8000
  simulate      which way to use the slots is the fastest? in virtual time: ductile simulate @ sim.toml
  plan          the same for a run that was recorded, from what it measured: ductile plan runs/x
  fit           which layout and knobs fit these GPUs? ductile fit @ run.toml --gpus 8 --gpu-memory 80GiB
  replay        does the scheduler decide as it did in a run? ductile replay runs/x
  report        a run as one HTML file, who did what when: ductile report runs/x

  ductile <command> --help          all keys of a command; --help-all: also those that are not built yet
  ductile <command> --help optim    those with "optim" in their name
  ductile <command> ... --dry-run   write the resolved config (with [slurm], the script for sbatch, too) and stop
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    accept_any_text()
    try:
        return _main(argv)
    except BrokenPipeError:  # `ductile rl --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:  # a run has its own way to stop; whatever else is asked for ends at once
        print("\nductile: Stopped.", file=sys.stderr)
        return 130


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(OVERVIEW, end="")
        return 0 if words else BAD_CONFIG
    if words[0] == "--version":
        print(f"ductile {__version__}")
        return 0
    name, *rest = words
    if rest[:1] == ["--version"] and name in {*COMMANDS, *TOOLS, "check"}:
        return _main(rest)
    if name == "check":
        return _check(rest)
    if name in TOOLS:
        return resolve_name(TOOLS[name])(rest)
    command = COMMANDS.get(name)
    if command is None:
        near = did_you_mean(name, [*COMMANDS, *TOOLS, "check"])
        print(f"ductile: there is no command {name}.{near}\n\n{OVERVIEW}", end="", file=sys.stderr)
        return BAD_CONFIG
    if _wants_help(command, rest):
        return 0
    if "LOCAL_RANK" in os.environ:
        return _under_torchrun(command, rest)
    return _run(command, rest)


def _run(command: CommandEntry, words: list[str]) -> int:
    name = command.name
    parsed = _parse(command, words, f"ductile {name}")
    if parsed is None:
        return BAD_CONFIG
    if _is_submitted(parsed.config):
        return _submit(name, parsed.config)
    if parsed.config.dry_run:
        return _dry_run(command, parsed)
    sys.argv[1:] = without_secrets(sys.argv[1:])  # W&B and benchmarks write it down
    try:
        return resolve_name(f"ductile.orchestrator.commands.run:run_{name}")(parsed.config)
    except KeyboardInterrupt:
        return 130


def _under_torchrun(command: CommandEntry, words: list[str]) -> int:
    """Rank 0 runs the command, and what is wrong with it is said there alone; the others join its run."""
    from ductile.cluster.agent import num_gpus
    from ductile.cluster.torchrun import BadLaunch, Rank, follow, keep_logs, leave

    who = f"ductile {command.name}"
    rank = Rank.of(os.environ)
    if rank is None:
        return _run(command, words)
    with redirect_stderr(io.StringIO() if rank.rank else sys.stderr):
        parsed = _parse(command, words, who)
        if parsed is None:
            return BAD_CONFIG
        try:
            words = [*words, *rank.words(parsed.config)]
        except BadLaunch as error:
            _print_error(f"{who}: {as_sentence(str(error))}")
            return BAD_CONFIG
    leave(os.environ, rank, num_gpus())
    if parsed.config.dry_run:
        return 0 if rank.rank else _run(command, words)
    keep_logs(rank, parsed.config.output_dir)
    return follow(rank, parsed.config.output_dir) if rank.rank else _run(command, words)


def _check(words: list[str]) -> int:
    """`ductile check rl @ run.toml`; without a command, it is `rl`; the `@` may be left out."""
    command = COMMANDS["rl"]
    if words and words[0] in COMMANDS:
        command = COMMANDS[words.pop(0)]
    if words and not words[0].startswith(("@", "-")):
        words.insert(0, "@")
    if _wants_help(command, words):
        return 0
    parsed = _parse(command, words, "ductile check")
    if parsed is None:
        return BAD_CONFIG
    from ductile.config.checks.summary import summary
    from ductile.orchestrator.commands.rehearse import rehearse
    from ductile.orchestrator.ending.supervise import UNFIT

    if isinstance(parsed.config, RouterRunConfig):
        print(summary(parsed, command.name))
        return 0
    try:
        found = rehearse(parsed.config)
    except UNFIT as error:
        _print_error(f"ductile check: {as_sentence(str(error))}")
        return BAD_CONFIG
    print(summary(parsed, command.name, found.resumes, found.about.sentence, found.about.first))
    if _is_submitted(parsed.config):
        from ductile.cluster.slurm.job import job_report

        print(job_report(command.name, parsed.config))
    return 0


def _is_submitted(config: CommandConfig) -> TypeGuard[RLConfig | SFTConfig | InferenceRunConfig]:
    """Return whether the command is for SLURM to run, and not for this machine."""
    return isinstance(config, RLConfig | SFTConfig | InferenceRunConfig) and config.slurm is not None


def _submit(name: str, config: RLConfig | SFTConfig | InferenceRunConfig) -> int:
    """What the job would refuse is found before it waits in a queue."""
    if not config.dry_run:
        from ductile.orchestrator.commands.rehearse import rehearse
        from ductile.orchestrator.ending.supervise import UNFIT

        try:
            rehearse(config)
        except UNFIT as error:
            _print_error(f"ductile {name}: {as_sentence(str(error))}")
            return BAD_CONFIG
    from ductile.cluster.slurm.submit import submit

    return submit(name, config)


def _wants_help(command: CommandEntry, words: list[str]) -> bool:
    at = next((index for index, word in enumerate(words) if word in ("-h", "--help", "--help-all")), None)
    if at is None:
        return False
    from ductile.config.reading.help import help_text

    only = words[at + 1] if at + 1 < len(words) else ""
    print(help_text(command.name, command.summary, command.root, only, unbuilt=words[at] == "--help-all"))
    return True


def _parse(command: CommandEntry, words: list[str], who: str) -> Parsed[CommandConfig] | None:
    try:
        parsed = parse(command.root, words)
    except ConfigError as error:
        _print_error(f"{who}: {error}")
        if other := _meant_for(command, words, error):
            line = pasteable("check", other, *words)
            print(f"\nThis looks like a config of `ductile {other}`. To check it: {line}", file=sys.stderr)
        return None
    for notice in parsed.notices:
        print(f"note: {notice}", file=sys.stderr)
    return parsed


def _print_error(text: str) -> None:
    """Names and values come from files of others: what steers a terminal is spelled out."""
    from ductile.dashboard.printable import printable

    print(printable(text, keep="\n"), file=sys.stderr)


def _meant_for(command: CommandEntry, words: list[str], error: ConfigError) -> str:
    """The first command that knows these keys, where this one does not know several of them; else ""."""
    if _num_unknown(error) < 2:
        return ""  # a slip, which has a suggestion of its own
    for other in COMMANDS.values():
        try:
            parse(other.root, words)
        except ConfigError as its_error:
            if _num_unknown(its_error):
                continue
        if other is not command:
            return other.name
    return ""


def _num_unknown(error: ConfigError) -> int:
    return sum(problem.is_unknown_key for problem in error.problems)


def _dry_run(command: CommandEntry, parsed: Parsed[CommandConfig]) -> int:
    from ductile.config.checks.written import DRY_RUN, of_a_run
    from ductile.config.reading.dump import write_resolved

    folder = Path(parsed.config.output_dir)
    try:
        # The config of a run that is there belongs to its records.
        name = "config.toml" if of_a_run(folder) is None else DRY_RUN
        path = write_resolved(parsed.config, folder, command.name, name)
    except OSError as error:
        print(f"ductile {command.name}: cannot write the resolved config: {error}", file=sys.stderr)
        return BAD_CONFIG
    print(f"The config is good. Resolved: {path}")
    return 0
