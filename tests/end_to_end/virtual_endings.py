"""Endings of a run in virtual time: the real loop, saver and checkpoints; slots, graders and the clock are doubles.

`ending(seed, folder)` draws a run, a way to end it and a moment, lets it end, looks at what is on disk, and goes on.
"""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ductile.core.batch.advantage import mean_baseline
from ductile.elastic.controller import ElasticController
from ductile.elastic.policy_decision import BadDecision
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.ending.progress import TRAINER, Checkpoints, Progress
from ductile.orchestrator.ending.run_until import SlotDied
from ductile.orchestrator.loop.evaluate import RewardsFailed
from ductile.roles import CustomCodeFailed, Late, Refused, SlotLost
from ductile.tasks.grader import Graded
from ductile.tasks.task import TaskError
from tests.core.scheduling.scenes import scene
from tests.elastic.test_controller import Scripted, ScriptedStage
from tests.orchestrator.doubles import (
    FakeGenerators,
    FakeScorer,
    FakeTrainer,
    InProcessGraders,
    Stage,
    clock,
    random_delays,
    read,
    run,
    write,
)

MAX_STEPS = 10
LONGEST_S = 20.0
"""Most runs are longer."""
PATIENCE_S = 50.0
"""Of every wait."""


@dataclass
class World:
    """What the doubles look at: has the moment come, and what goes wrong then?"""

    kind: str
    moment_s: float
    trainer_lost: bool = False
    struck: bool = False
    death: asyncio.Event = field(default_factory=asyncio.Event)

    def strikes(self, kind: str) -> bool:
        strikes = self.kind == kind and clock() >= self.moment_s
        self.struck |= strikes
        return strikes


class Trainer(FakeTrainer):
    """Its state is the number of its optimizer steps. Lost, it replies to nothing."""

    def __init__(self, diary, world: World, steps: int, **how: Any) -> None:
        super().__init__(diary, **how)
        self.world, self.steps = world, steps

    def _check(self) -> None:
        if self.world.trainer_lost:
            raise SlotLost("slot 0 (train, pid 7) was killed by SIGKILL")

    async def forward_backward(self, samples, seq_len):
        self._check()
        if self.world.strikes("loss raises"):
            raise Refused("slot 0: ForwardBackward failed: LossFailed: trainer.loss failed: ZeroDivisionError")
        await super().forward_backward(samples, seq_len)
        self._check()

    async def optim_step(self, loss_denominator):
        self._check()
        report = await super().optim_step(loss_denominator)
        self._check()
        return report

    async def publish(self, version):
        self._check()
        if self.world.strikes("publisher fails"):
            raise Refused("slot 0: Publish failed: OSError: Cannot allocate memory")
        await asyncio.sleep(0.1)
        return await super().publish(version)

    async def withdraw(self, version):
        self._check()
        await super().withdraw(version)

    async def save(self, path):
        self._check()
        if self.world.strikes("disk full"):
            raise Refused("slot 0: SaveState failed: StateError: No space left on device")
        steps = self.steps
        await asyncio.sleep(0.4)
        self._check()
        assert self.steps == steps, "nothing is trained while the state is written"
        write(path, str(steps))


class Generators(FakeGenerators):
    def __init__(self, diary, world: World, **how: Any) -> None:
        super().__init__(diary, **how)
        self.world = world

    async def generate(self, request):
        if self.world.strikes("generator fails"):
            raise SlotLost("slot 1 (generate, pid 8) was killed by SIGKILL")
        if self.world.strikes("generator hangs"):
            await asyncio.sleep(PATIENCE_S)
            raise Late("slot 1 made no progress")
        return await super().generate(request)

    async def receive(self, manifest):
        if self.world.strikes("generator hangs at weights"):
            await asyncio.sleep(PATIENCE_S)  # then it is left behind, and the version is live on the others
        return await super().receive(manifest)


class Scorer(FakeScorer):
    def __init__(self, diary, world: World) -> None:
        super().__init__(diary)
        self.world = world

    async def score(self, samples, model):
        if self.world.strikes("scorer fails"):
            raise SlotLost("slot 2 (score, pid 9) was killed by SIGKILL")
        return await super().score(samples, model)


class Graders(InProcessGraders):
    def __init__(self, tasks, world: World) -> None:
        super().__init__(tasks)
        self.world = world

    async def reward(self, task, example, completion):
        await asyncio.sleep(0.1)
        if self.world.strikes("graders cannot be started"):
            raise TaskError("a grader process ended its process (exit code 1) while it made its tasks")
        if self.world.strikes("reward raises"):
            return Graded(error="raised ZeroDivisionError: float division by zero")  # such groups teach nothing
        return await super().reward(task, example, completion)


def _advantage(world: World) -> Callable[..., list[float]]:
    def advantage(rewards, group):
        if world.strikes("advantage raises"):
            return [1 / 0]
        if world.strikes("advantage is of no use"):
            return [float("nan")] * len(rewards)
        return mean_baseline(rewards, group)

    return advantage


class Policy(Scripted):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def decide(self, state):
        if self.world.strikes("policy raises"):
            raise ZeroDivisionError("float division by zero")
        return super().decide(state)


def _controller(world: World, stage: Stage) -> ElasticController:
    controller = ElasticController(Policy(world), ScriptedStage(scene()), stage.record, rest_s=lambda took_s: 0.5)
    stage.buffer.on_change.add(controller.notify)
    return controller


SAVES_ALL: dict[str, type[BaseException] | None] = {
    "ctrl-c": None,
    "generator fails": SlotLost,
    "generator hangs": Late,
    "generator dies": SlotDied,
    "generator hangs at weights": None,
    "scorer fails": SlotLost,
    "graders cannot be started": TaskError,
    "reward raises": RewardsFailed,
    "advantage raises": CustomCodeFailed,
    "advantage is of no use": CustomCodeFailed,
    "loss raises": Refused,
    "policy raises": BadDecision,
    "publisher fails": Refused,
    "metrics full": None,
    "samples full": None,
}
"""Ways to end while the trainer is as good as before, and what is raised: every step that was trained is saved."""
SAVES_WHAT_WAS_DUE: dict[str, type[BaseException]] = {
    "trainer dies": SlotDied,
    "trainer fails": SlotLost,
    "disk full": Refused,
    "ctrl-c twice": asyncio.CancelledError,
}
"""Ways after which there is the last checkpoint that was made."""
KINDS = (*SAVES_ALL, *SAVES_WHAT_WAS_DUE)
GOES_ON = ("generator hangs at weights",)
"""What a run survives: it trains all its steps."""
JOURNALS_FULL = ("metrics full", "samples full")


async def _strike(world: World, stage: Stage, running: asyncio.Task[int]) -> None:
    """What happens by itself at the moment; all else happens when somebody is asked."""
    await asyncio.sleep(world.moment_s)
    match world.kind:
        case "ctrl-c":
            stage.stop.set()
        case "ctrl-c twice":
            stage.stop.set()
            await asyncio.sleep(0.3)
            running.cancel()
            await asyncio.sleep(3)
            running.cancel()  # as `run_until` does when it has waited
        case "generator dies":
            world.death.set()
        case "trainer dies":
            world.trainer_lost = True
            world.death.set()
        case "trainer fails":
            world.trainer_lost = True
        case "metrics full" | "samples full":  # and a moment later Ctrl-C, with room again
            with await full(stage.folder / f"{world.kind.split()[0]}.jsonl"):
                await asyncio.sleep(3)
                stage.stop.set()
        case _:
            pass


async def full(file: Path) -> AbstractContextManager[None]:
    """Waits until somebody of this process writes the file. What is written then fails, as on a full disk."""
    while not (found := _descriptors_of(file)):  # noqa: ASYNC110 (nobody tells of it)
        await asyncio.sleep(0.1)
    return _full(found[0])


@contextmanager
def _full(descriptor: int) -> Iterator[None]:
    device, kept = os.open("/dev/full", os.O_WRONLY), os.dup(descriptor)
    os.dup2(device, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(device)


def _descriptors_of(file: Path) -> list[int]:
    return [int(link.name) for link in Path("/proc/self/fd").iterdir() if _leads_to(link) == str(file)]


def _leads_to(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the descriptor by which the folder is read
        return ""


async def _live(world: World, stage: Stage) -> BaseException | None:
    """One life of the run. Returns what ended it."""
    if world.kind in JOURNALS_FULL:  # there is room again before the journals are closed
        running = asyncio.create_task(stage.go(lambda stage: _strike(world, stage, running)))
        [outcome] = await asyncio.gather(running, return_exceptions=True)
        return outcome if isinstance(outcome, BaseException) else None
    running = asyncio.create_task(stage.go())
    await asyncio.sleep(0)
    striking = asyncio.create_task(_strike(world, stage, running))
    [outcome] = await asyncio.gather(running, return_exceptions=True)
    striking.cancel()
    await asyncio.gather(striking, return_exceptions=True)
    return outcome if isinstance(outcome, BaseException) else None


@dataclass
class KeepingStage(Stage):
    keep_last: int | None = None
    """Of its checkpoints."""


def _stage(folder: Path, world: World, draw: random.Random, **how: Any) -> Stage:
    keep_last = draw.choice([None, 1, 2])
    checkpoints = Checkpoints(folder / "state", keep_last)
    step = checkpoints.find(-1)
    Recorder(folder).rewind(step or -1)
    progress = checkpoints.load(step) if step else Progress()
    steps = int(read(str(checkpoints.path(step) / TRAINER))) if step else 0

    async def death() -> str:
        await world.death.wait()
        return "a slot was killed by SIGKILL"

    return KeepingStage(
        folder,
        keep_last=keep_last,
        max_steps=MAX_STEPS,
        max_reward_error_share=0.5,
        num_examples=1000,
        timeout_s=2 * PATIENCE_S,
        step=progress.step,
        position=progress.prompts,
        trainer=partial(Trainer, world=world, steps=steps, chunk_s=0.3),
        generators=partial(
            Generators,
            world=world,
            capacity=draw.choice([4, 8, 32]),
            delay=random_delays(draw.randrange(1 << 30), longest_s=draw.choice([2.0, 20.0])),
            receive_s=draw.choice([0.05, 0.5, 3.0]),
            num_tokens=4,
        ),
        graders=partial(Graders, world=world),
        advantage=_advantage(world),
        death=death,
        controller=partial(_controller, world) if world.kind == "policy raises" else None,
        checkpoints=checkpoints,
        **how,
    )


def _settings(kind: str, draw: random.Random) -> dict[str, Any]:
    ahead = draw.randint(0, 2)
    return {
        "max_async_level": ahead,
        "max_off_policy_steps": ahead + draw.randint(0, 1),
        "eval_prompts": draw.choice([0, 3]),
        "eval_interval": draw.choice([None, 2]),
        "save_interval": draw.choice([None, 1, 3]),
        "n_minibatches": draw.choice([1, 1, 2]),
        "scorer": True if kind == "scorer fails" else draw.choice([False, False, True]),
    }


def ending(seed: int, folder: Path) -> str:
    """Raises AssertionError when something is lost. Returns what happened: "ctrl-c", or "ctrl-c, too late"."""
    draw = random.Random(seed)
    world = World(KINDS[seed % len(KINDS)], draw.uniform(0.3, LONGEST_S))
    settings = _settings(world.kind, draw)
    with_scorer = settings.pop("scorer")
    stage = _stage(folder, world, draw, scorer=partial(Scorer, world=world) if with_scorer else None, **settings)
    ended = run(_live(world, stage))
    saved, mid_step = _look(world, stage, ended)
    calm = World("nothing", 0.0)
    again = _stage(folder, calm, draw, scorer=partial(Scorer, world=calm) if with_scorer else None, **settings)
    assert again.step == saved
    assert run(_live(calm, again)) is None
    assert again.checkpoints.steps()[-1] == MAX_STEPS
    before = [prompt.id for step, prompt in stage.trained if step < saved + mid_step]
    after = [prompt.id for _, prompt in again.trained]
    assert len({*before, *after}) == len(before) + len(after), "no prompt is trained on twice"
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(MAX_STEPS + 1))
    assert [row["step"] for row in read_jsonl(folder / "samples.jsonl")] == list(range(1, MAX_STEPS + 1))
    happened = ended is not None or stage.loop.step < MAX_STEPS or (world.kind in GOES_ON and world.struck)
    return world.kind if happened else f"{world.kind}, too late"


def _look(world: World, stage: Stage, ended: BaseException | None) -> tuple[int, bool]:
    """The latest step that is saved, and whether it was saved between two optimizer steps of the next one."""
    plan, trained, there = stage.loop.schedule, stage.loop.step, stage.checkpoints.steps()
    if ended is None:
        assert trained == MAX_STEPS or world.kind in ("ctrl-c", "ctrl-c twice", *JOURNALS_FULL), world
    else:
        expected = {**SAVES_ALL, **SAVES_WHAT_WAS_DUE}[world.kind]
        assert expected is not None, ended
        assert isinstance(ended, expected), (world, repr(ended))
    due = [step for step in range(1, trained + 1) if step == MAX_STEPS or stage.loop.output.save_due(step)]
    if ended is None or world.kind in SAVES_ALL:
        assert max(there, default=0) == trained, (world, there, trained)
    elif due and due[-1] == trained:
        due.pop()  # its save may be what was struck
    keep_last = stage.keep_last or len(due)
    assert {step for step in due[-keep_last:] if step >= min(there, default=0)} <= set(there), (world, there, due)
    assert len(there) >= min(len(due), keep_last), (world, there, due)
    events = [row["kind"] for row in read_jsonl(stage.folder / "events.jsonl")]
    no_updates = events.count("nothing_to_learn")
    for step in there:
        updates = _updates(stage, step)
        assert step * plan.n_minibatches - no_updates <= updates < (step + 1) * plan.n_minibatches, (
            "the weights are the books'"
        )
    saved = max(there, default=0)
    return saved, bool(there) and _updates(stage, saved) > saved * plan.n_minibatches


def _updates(stage: Stage, step: int) -> int:
    """Optimizer steps of the trainer that is saved."""
    return int(read(str(stage.checkpoints.path(step) / TRAINER)))
