"""`ductile resize`, `ductile drain`, `ductile fleet` and `ductile status`: asking a live run, from a shell.

0     done
1     the run did not do it: it was rolled back, slots were not empty in time, the run ended, or another resize is under
      way
2     nothing was tried: no live run, or something that cannot be
130   stopped waiting, with Ctrl-C; the run does it all the same
"""

import argparse
import re
import sys
from collections.abc import Sequence

import msgspec

from ductile.cluster.slurm.login import run_in_job
from ductile.config.reading.command_line import parse_with_folder, pasteable, path_argument, print_error
from ductile.core.layout.choice.layout_text import EXAMPLE
from ductile.messages.control import Resized, RunFailed, Unfit
from ductile.orchestrator.control.control import DRAIN_S, FLEET_S, RESIZE_S, OnAnotherMachine, Run

DONE, NOT_DONE, UNFIT, INTERRUPTED = 0, 1, 2, 130
EXAMPLES = {"list": "", "join": " http://10.0.0.7:8000", "drain": " 10.0.0.7:8000", "evict": " 10.0.0.7:8000"}
ACTIONS = tuple(EXAMPLES)


def resize(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ductile resize",
        description="Change the slots that a live run trains on, how its model lies on them, or both, while it trains.",
    )
    parser.add_argument(
        "--train",
        metavar="SLOTS",
        help="for example 0-3, or 0,2,5; default: as many as --layout has, preferring those that train",
    )
    parser.add_argument(
        "--layout",
        metavar="SIZES",
        default="",
        help=f"for example {EXAMPLE}; default: as the run's config has it for so many slots (trainer.resize.layouts)",
    )
    parser.add_argument(
        "--dp-replicate", "--replicas", type=int, metavar="N", help="copies of the state; the other axes stay as now"
    )
    parser.add_argument("--timeout", type=float, default=RESIZE_S, metavar="S", help="how long to wait for it")
    parser.add_argument("--json", action="store_true", help="print what happened as JSON")
    asked = parse_with_folder(parser, words)
    sizes = {} if asked.dp_replicate is None else {"dp_replicate": asked.dp_replicate}
    try:
        train = None if asked.train is None else slot_list(asked.train)
        result = Run(asked.run).resize(train, asked.timeout, asked.layout, **sizes)
    except (Unfit, RunFailed, KeyboardInterrupt) as error:
        return _not_done("resize", words, error, see=pasteable("status", asked.run))
    if asked.json:
        print(msgspec.json.encode(result).decode())
    else:
        print(result.sentence)
        if result.outcome != "unchanged":
            print(times(result))
    return NOT_DONE if result.outcome == "rolled_back" else DONE


def drain(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ductile drain",
        description="Empty slots of a live run, and end them: requests go on at other generators with the tokens that "
        "they have, and the trainer on other slots. Nothing is lost, and the run does not use the slots any more.",
    )
    parser.add_argument("--slot", "--slots", metavar="SLOTS", default="", help="for example 3, 0-3, or 0,2,5")
    parser.add_argument("--node", type=int, metavar="N", help="all slots of this node")
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=DRAIN_S,
        metavar="S",
        help=f"seconds within which they must be gone; default: {DRAIN_S:g}. What cannot be emptied works on",
    )
    parser.add_argument("--back", action="store_true", help="have slots come back that were drained")
    parser.add_argument("--json", action="store_true", help="print what happened as JSON")
    asked = parse_with_folder(parser, words)
    if not asked.slot and asked.node is None:
        parser.error(f"write which slots: {pasteable('drain', asked.run, '--slot')} 3, or --node 0")
    try:
        slots = slot_list(asked.slot, "--slot") if asked.slot else ()
        run = Run(asked.run)
        done = run.bring_back(slots, asked.node) if asked.back else run.drain(slots, asked.node, asked.deadline_s)
    except (Unfit, RunFailed, KeyboardInterrupt) as error:
        return _not_done("drain", words, error, see=pasteable("status", asked.run))
    print(msgspec.json.encode(done).decode() if asked.json else done.sentence)
    return DONE


def status(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ductile status", description="What a live run does, slot by slot.")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    asked = parse_with_folder(parser, words)
    try:
        known = Run(asked.run).status()
    except (Unfit, RunFailed) as error:
        return _not_done("status", words, error)
    if asked.json:
        print(msgspec.json.encode(known).decode())
    else:
        from ductile.orchestrator.control.status_table import show  # rich takes a while to import

        show(known)
    return DONE


def fleet(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ductile fleet",
        description="The servers that generate for a live run: which there are, and have them come and go.",
        epilog="list: which there are (what it does when nothing is said). join URL: have a server come, with the live "
        "weights. drain ID: have one leave when it has finished what it generates. evict ID: have one leave at once; "
        "others go on with what it has.",
    )
    parser.add_argument("run", type=path_argument, metavar="FOLDER", help="the run's output_dir")
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", metavar="|".join(ACTIONS))
    parser.add_argument("server", nargs="?", default="", metavar="URL|ID", help="its address, or its id in the list")
    parser.add_argument("--timeout", type=float, default=FLEET_S, metavar="S", help="how long to wait for it")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    asked = parser.parse_args(list(words))
    if (asked.action == "list") == bool(asked.server):
        takes = "takes nothing more" if asked.action == "list" else "needs a server"
        parser.error(f"{asked.action} {takes}: {pasteable('fleet', asked.run, asked.action)}{EXAMPLES[asked.action]}")
    try:
        known = Run(asked.run).fleet(asked.action, asked.server, asked.timeout)
    except (Unfit, RunFailed, KeyboardInterrupt) as error:
        return _not_done("fleet", words, error, see=pasteable("fleet", asked.run))
    if asked.json:
        print(msgspec.json.encode(known).decode())
    else:
        from ductile.orchestrator.control.status_table import print_fleet  # rich takes a while to import

        print_fleet(known)
    return DONE


def times(result: Resized) -> str:
    """What a resize cost, as who asked for it sees it; its phases are in events.jsonl."""
    what = "resize" if result.outcome == "resized" else "attempt"
    return f"The {what} took {result.took_s:.2f} s, and kept training still for {result.pause_s:.2f} s of them."


def slot_list(text: str, flag: str = "--train") -> tuple[int, ...]:
    """ "0-1,3" as (0, 1, 3). Raises Unfit, which names the flag."""
    slots: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", word)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if found and last < first:
            raise Unfit(f"{flag} {text}: {word.strip()!r} runs backwards; write {last}-{first}")
        if not found:
            raise Unfit(
                f"{flag} {text}: {word.strip() or 'nothing'!r} is neither a slot nor a range; write 0-3 or 0,2,5"
            )
        slots += range(first, last + 1)
    if len(set(slots)) < len(slots):
        raise Unfit(f"{flag} {text} names a slot twice")
    return tuple(slots)


def _not_done(command: str, words: Sequence[str], error: Unfit | RunFailed | KeyboardInterrupt, see: str = "") -> int:
    """Say why the run has not done what it was asked for, and return the exit code. A run that is a job of SLURM is
    asked on its own node. see: command that tells what has become of it."""
    if isinstance(error, OnAnotherMachine) and (code := run_in_job(error.folder, [command, *words])) is not None:
        return code
    if isinstance(error, KeyboardInterrupt):
        print(f"ductile {command}: Stopped waiting; what was asked for goes on. See: {see}", file=sys.stderr)
        return INTERRUPTED
    print_error(command, error)
    return UNFIT if isinstance(error, Unfit) else NOT_DONE
