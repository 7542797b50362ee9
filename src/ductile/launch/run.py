"""From a validated config to processes and back to an exit code: one function for each command of the CLI.

0     done
1     something died or failed; the last line on stderr says what, and how to go on
2     nothing was started: what the config names is missing or in use
130   stopped by Ctrl-C, in order (the step is saved) or at once
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from ductile.config.dump import write_resolved
from ductile.config.imports import ImportPathError
from ductile.config.run import RLConfig
from ductile.config.slots import placement_of
from ductile.core.cluster.placement import SPELLED, Placement
from ductile.launch.attend import SlotDied, Stopped, attend
from ductile.launch.cap import CapNotPermitted
from ductile.launch.folder import FolderInUse, run_folder
from ductile.launch.interrupt import Interrupt, interrupts
from ductile.launch.local import ROLES, LocalCluster
from ductile.launch.processes import StartFailed
from ductile.loop.compose import Prepared, RunResult, prepare, run_circle
from ductile.loop.progress import CheckpointError
from ductile.observe import Recorder
from ductile.roles import Late, Refused, SlotLost
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import TokenizerError
from ductile.wire.fleet import RemoteGenerators
from ductile.wire.messages import RoleName
from ductile.wire.remote import RemoteScorer, RemoteTrainer, hold

DONE, FAILED, NOT_STARTED, INTERRUPTED = 0, 1, 2, 130

T = TypeVar("T")


def run_rl(config: RLConfig) -> int:
    """`ductile rl`."""
    began_s = time.perf_counter()
    try:
        prepared = prepare(config)
        with run_folder(config.output_dir, config.clean) as folder:
            write_resolved(config, folder, "rl")
            record = Recorder(folder)
            try:
                return asyncio.run(_supervise("rl", folder, record, lambda i: _rl(prepared, record, i, began_s)))
            finally:
                record.close()
    except (TaskError, TokenizerError, ImportPathError, CheckpointError, FolderInUse, OSError) as error:
        print(f"ductile rl: {error}", file=sys.stderr)
        return NOT_STARTED


async def _rl(prepared: Prepared, record: Recorder, interrupt: Interrupt, began_s: float) -> RunResult:
    placement = placement_of(prepared.config)
    cluster = _cluster(prepared, placement)
    try:
        await attend(cluster.start(), interrupt.asked, cancel_s=8.0)
        for slot in placement.slots:
            roles, device, pid = placement.roles(slot), cluster.devices[slot], cluster.processes[slot].pid
            sentence = f"Slot {slot} ({' and '.join(roles)}) runs on {device}, pid {pid}."
            record.event("slot_started", sentence, slot=slot, roles=roles, device=device, pid=pid)
        trainer, generators, scorer = await attend(
            _take_roles(prepared, placement, cluster), interrupt.asked, cluster.death()
        )
        slots = {role: placement.of(role) for role in SPELLED if placement.of(role)}
        circle = run_circle(prepared, trainer, generators, scorer, record, interrupt.asked, slots, began_s)
        return await attend(circle, interrupt.insisted, cluster.death())
    finally:
        await cluster.stop()


def _cluster(prepared: Prepared, placement: Placement) -> LocalCluster:
    roles: dict[RoleName, str] = {role: path for role, path in ROLES.items() if placement.of(role)}
    return LocalCluster(placement.slots, prepared.config.cluster, prepared.folder / "logs", roles)


async def _take_roles(
    prepared: Prepared, placement: Placement, cluster: LocalCluster
) -> tuple[RemoteTrainer, RemoteGenerators, RemoteScorer | None]:
    """All slots load their models at the same time."""
    config, mailbox = prepared.config, cluster.mailbox
    timeout_s = config.cluster.command_timeout_s
    trainer, inference = prepared.trainer.model_dump(mode="json"), config.inference.model_dump(mode="json")
    await asyncio.gather(
        hold(mailbox, "train", trainer, placement.train, timeout_s, cluster.rendezvous),
        hold(mailbox, "generate", inference, placement.generate, timeout_s),
        hold(mailbox, "score", trainer, placement.score, timeout_s),
    )
    return (
        RemoteTrainer(mailbox, placement.train, timeout_s),
        RemoteGenerators(mailbox, placement.generate, config.inference.max_num_seqs, timeout_s),
        RemoteScorer(mailbox, placement.score, timeout_s) if placement.score else None,
    )


async def _supervise(
    command: str, folder: Path, record: Recorder, run: Callable[[Interrupt], Awaitable[object]]
) -> int:
    """Run to the end, whichever it is, and say in a sentence which one it was."""
    with interrupts() as interrupt:
        try:
            await run(interrupt)
        except Stopped:
            return _end(record, "stopped", "Stopped at once, as asked.", command, folder, INTERRUPTED)
        except SlotDied as error:
            return _end(record, "died", f"{_capital(str(error))}.", command, folder, FAILED)
        except (StartFailed, CapNotPermitted) as error:
            return _end(record, "not_started", f"{_capital(str(error))}.", command, folder, NOT_STARTED)
        except (SlotLost, Late, Refused, TaskError) as error:
            return _end(record, "failed", f"{_capital(str(error))}.", command, folder, FAILED)
        if interrupt.asked.is_set():
            return _end(record, "stopped", "Stopped after a whole step, as asked.", command, folder, INTERRUPTED)
        return DONE


def _end(record: Recorder, kind: str, sentence: str, command: str, folder: Path, code: int) -> int:
    record.event(kind, sentence)
    if code == NOT_STARTED:
        print(f"ductile {command}: {sentence}", file=sys.stderr)
    else:
        print(
            f"ductile {command}: {sentence} Logs: {folder / 'logs'}. "
            f"Go on with: ductile {command} @ {folder / 'config.toml'} --resume",
            file=sys.stderr,
        )
    return code


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
