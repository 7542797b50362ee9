"""What the orchestrator and the wire cost: a training step of many long completions, with engines and trainers that
compute nothing.

    python benchmarks/orchestrator.py [--completions 512] [--tokens 32768] [--before CHECKOUT] [--json F]

The loop, the buffer, the sample builder, the sockets, the codec and the slots' processes are the real ones. A generator
ends each request with the same made-up tokens of a vocabulary as large as Qwen3's, put together as the engine does it;
a trainer replies at once. `cpu_s_per_mtoken` is what orchestrator and slots use up together for a million generated
tokens, and `bytes_per_token` what goes over the sockets for one, to and from all slots. `longest_stall_ms` is the
longest time for which the orchestrator's event loop did nothing else.

`cpu_s_per_mtoken_before` is the same figure of another checkout of this repository, measured by its own copy of this
file. Without `--before` it is what the file of `--json` has.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# Slots find the roles below by this module's name.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

from budget import Budget, arguments
from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.instances.instances import instance_on
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.rollouts.staleness import StalenessBound
from ductile.elastic.step_accounting import StepAccounting
from ductile.fleet.requests.assign_role import assign_role, begin_instances
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.generator.engine.sequence import Sequence
from ductile.messages.workers import (
    Done,
    Finished,
    ForwardBackward,
    ForwardBackwardDone,
    Generate,
    OptimStep,
    Publish,
    Published,
    Stepped,
)
from ductile.observe import Recorder
from ductile.orchestrator.loop.assembly import assemble
from ductile.orchestrator.loop.buffer import Buffer
from ductile.orchestrator.loop.episode import Episodes
from ductile.orchestrator.loop.loop import Loop
from ductile.orchestrator.loop.rollouts import Rollouts
from ductile.orchestrator.loop.run_output import RunOutput
from ductile.orchestrator.loop.run_schedule import RunSchedule
from ductile.orchestrator.loop.sample_builder import SampleBuilder
from ductile.records import GenerateRequest, Manifest, Sampling, StepReport
from ductile.roles import RoleAssignment, Task
from ductile.tasks.grader import Graded
from ductile.tasks.prompts import ExampleOrder, Prompts
from ductile.transport import router
from ductile.transport.deadlines import Deadlines
from ductile.transport.parcel import Parcel
from provenance import provenance, write

VOCAB_SIZE, PROMPT_TOKENS, GROUP_SIZE = 151_936, 256, 8
TRAIN, GENERATE = (0, 1), (2, 3)
SAMPLES_PER_MICRO_BATCH = 2
DEADLINE_S = 600.0
COMPARED = ("cpu_s_per_mtoken", "bytes_per_token", "longest_stall_ms")
BEAT_S = 0.001
"""How often the event loop is asked whether it still turns."""


class Generator:
    """A generate role that ends every request with the same tokens, one request a step."""

    def __init__(self, settings: dict[str, Any], assignment: RoleAssignment) -> None:
        self._waiting: list[GenerateRequest] = []
        num_tokens, draw = int(settings["num_tokens"]), random.Random(assignment.slot)
        request = GenerateRequest("any", (1,) * PROMPT_TOKENS, Sampling())
        self._sequence = Sequence(request, (0, 0), 0, PROMPT_TOKENS + num_tokens, ())
        for _ in range(num_tokens):
            self._sequence.append(draw.randrange(VOCAB_SIZE), -draw.random(), 0)

    def handle(self, command: Any) -> Any:
        if isinstance(command, Generate):
            self._waiting += command.requests
        return Done()

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Finished]:
        self._sequence.request = self._waiting.pop(0)
        return [Finished((self._sequence.generation("length"),))]

    def close(self) -> None:
        pass


class Trainer:
    """A train role that trains nothing."""

    def __init__(self, settings: dict[str, Any], assignment: RoleAssignment) -> None:
        self._num_steps = 0

    def handle(self, command: Any) -> Any:
        match command:
            case ForwardBackward(micro_batches):
                num_tokens = sum(each.num_tokens for each in micro_batches)
                return ForwardBackwardDone(num_tokens, 0.0)
            case OptimStep():
                self._num_steps += 1
                return Stepped(StepReport(self._num_steps, 0.0, 1.0, 1e-6, 1))
            case Publish(version):
                return Published(Manifest(version, "shared_memory", "nowhere", 0, 0, ()))
            case _:
                return Done()

    def has_work(self) -> bool:
        return False

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class Tokens:
    """A tokenizer of prompts that are all equally long. It writes nothing, so that none of the time is its own."""

    chat_template = None
    eos_token_ids = (0,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(text)] * PROMPT_TOKENS

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return ""


class Questions(Task):
    name = "questions"

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def messages(self, example: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(example)}]


class Graders:
    """Rewards at once, half of them 1."""

    def __init__(self) -> None:
        self._num_asked = 0

    async def reward(self, task: str, example: int, completion: Any) -> Any:
        self._num_asked += 1
        return Graded(float(self._num_asked % 2))


async def stalls(found: list[float]) -> None:
    """Note how long the event loop took for each turn, until cancelled."""
    while True:
        since_s = time.perf_counter()
        await asyncio.sleep(BEAT_S)
        found.append(time.perf_counter() - since_s - BEAT_S)


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that these processes have used, all their threads together."""
    used = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in used) / os.sysconf("SC_CLK_TCK")


def count_bytes(counted: Counter[str]) -> None:
    """Have the router's frames counted, those that it sends and those that it gets."""
    make_frame, decode = Parcel.frame, router.decode

    async def counting_frame(parcel: Parcel, epoch: int, sequence: int) -> bytes:
        frame = await make_frame(parcel, epoch, sequence)
        counted[type(parcel.command).__name__] += len(frame)
        return frame

    def counting_decode(frame: Any) -> Any:
        envelope = decode(frame)
        counted[type(envelope.body).__name__] += len(frame)
        return envelope

    Parcel.frame, router.decode = counting_frame, counting_decode


def make_loop(cluster: LocalCluster, completions: int, num_tokens: int, record: Recorder) -> Loop:
    length, num_groups = PROMPT_TOKENS + num_tokens, completions // GROUP_SIZE
    deadlines = Deadlines.same(DEADLINE_S)
    trainer = RemoteTrainer(cluster.mailbox, ParallelLayout.of(TRAIN), deadlines)
    instances = [instance_on("generate", (slot,)) for slot in GENERATE]
    slots = RoleSlots(cluster.mailbox, "generate", deadlines.command_s)
    generators = RemoteGenerators(slots, instances, completions // len(GENERATE), 16, deadlines)
    task, tokenizer, stop = Questions(num_groups), Tokens(), asyncio.Event()
    graders: Any = Graders()
    episodes = Episodes({"train": task}, tokenizer, generators, graders, length)
    prompts = Prompts(task, tokenizer, ExampleOrder(range(num_groups)), PROMPT_TOKENS)
    schedule = RunSchedule(1, StalenessBound(num_groups, 0, 0), GROUP_SIZE, seq_len=SAMPLES_PER_MICRO_BATCH * length)
    buffer = Buffer(prompts, schedule.staleness, record, version=0, max_steps=1, timeout_s=DEADLINE_S, stop=stop)
    rollouts = Rollouts(buffer, episodes, generators, Sampling(max_tokens=num_tokens), GROUP_SIZE)
    output = RunOutput(record, schedule, buffer, tokenizer, counted=(buffer,))
    accounting = StepAccounting(schedule.step_size(scores=False), buffer, rollouts)
    return assemble(schedule, trainer, rollouts, SampleBuilder(), None, output, accounting, None, stop)


async def measure(completions: int, num_tokens: int, folder: Path) -> dict[str, float]:
    """One step, from the first request to the optimizer step's report."""
    roles: Any = {"train": "orchestrator:Trainer", "generate": "orchestrator:Generator"}
    slots = (*TRAIN, *GENERATE)
    counted, turns = Counter[str](), list[float]()
    async with LocalCluster(slots, ClusterConfig(device="cpu"), folder, roles) as cluster:
        settings = {"num_tokens": num_tokens}
        await assign_role(cluster.mailbox, "train", settings, [ParallelLayout.of(TRAIN)], DEADLINE_S)
        generators = [instance_on("generate", (slot,)) for slot in GENERATE]
        await begin_instances(cluster.mailbox, generators, settings, DEADLINE_S)
        record = Recorder(folder)
        loop = make_loop(cluster, completions, num_tokens, record)
        count_bytes(counted)
        pids = [os.getpid(), *(cluster.processes[slot].pid for slot in slots)]
        watching = asyncio.create_task(stalls(turns))
        before_s, began_s = [cpu_s([pid]) for pid in pids], time.perf_counter()
        await loop.run()
        wall_s = time.perf_counter() - began_s
        used_s = [cpu_s([pid]) - before for pid, before in zip(pids, before_s, strict=True)]
        watching.cancel()
    (row,) = (row for row in record.rows() if row["step"] == 1)
    generated = completions * num_tokens
    if row["sampled_tokens"] != generated:
        raise RuntimeError(f"the step trained {row['sampled_tokens']:.0f} tokens, not {generated}")
    return {
        "completions": completions,
        "tokens_per_completion": num_tokens,
        "cpu_s_per_mtoken": sum(used_s) / generated * 1e6,
        "orchestrator_cpu_s_per_mtoken": used_s[0] / generated * 1e6,
        "bytes_per_token": sum(counted.values()) / generated,
        "generated_bytes_per_token": counted["Finished"] / generated,
        "trained_bytes_per_token": counted["ForwardBackward"] / generated,
        "longest_stall_ms": 1e3 * max(turns),
        "wall_s": wall_s,
    }


def measure_checkout(checkout: Path, completions: int, num_tokens: int, budget: Budget) -> dict[str, Any]:
    """What another checkout measures of itself, and its commit."""
    script = checkout / "benchmarks" / Path(__file__).name
    if not script.is_file():
        raise SystemExit(f"--before {checkout}: it has no benchmarks/{script.name}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "before.json"
        words = ["--completions", str(completions), "--tokens", str(num_tokens), "--json", str(file)]
        budget.run([sys.executable, str(script), *words], os.environ | {"PYTHONPATH": str(checkout / "src")})
        found = json.loads(file.read_text())
    commit = budget.run(["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]).strip()
    return {f"{name}_before": found[name] for name in COMPARED} | {"commit_before": commit}


def measured_before(file: Path | None) -> dict[str, Any]:
    """What an earlier run has compared with, of its file."""
    if file is None or not file.exists():
        return {}
    return {name: value for name, value in json.loads(file.read_text()).items() if name.endswith("_before")}


def shown(figures: dict[str, Any]) -> str:
    return (
        "{cpu_s_per_mtoken:.3f} CPU seconds a million tokens ({orchestrator_cpu_s_per_mtoken:.3f} of them the "
        "orchestrator's), {bytes_per_token:.2f} bytes a token ({generated_bytes_per_token:.2f} from the generators, "
        "{trained_bytes_per_token:.2f} to the trainer); the event loop stood still for at most "
        "{longest_stall_ms:.0f} ms; {wall_s:.1f} s"
    ).format(**figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--completions", type=int, default=512, help=f"a multiple of {GROUP_SIZE}")
    parser.add_argument("--tokens", type=int, default=32_768, help="of each completion")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    asked = parser.parse_args()
    budget, figures = Budget(asked.budget), measured_before(asked.json)
    with budget.turn_of("--before"):
        if asked.before:
            figures = measure_checkout(asked.before, asked.completions, asked.tokens, budget)
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures |= asyncio.run(
                asyncio.wait_for(measure(asked.completions, asked.tokens, Path(folder)), budget.left_s)
            )
        except TimeoutError:
            raise SystemExit(f"The step had not ended when the {asked.budget:g} s were over.") from None
    print(shown(figures))
    if "cpu_s_per_mtoken_before" in figures:
        figures["times_less_cpu"] = figures["cpu_s_per_mtoken_before"] / figures["cpu_s_per_mtoken"]
        print(f"{figures['times_less_cpu']:.1f} times less CPU than at {figures['commit_before']}")
    write(asked.json, {**provenance("ductile", "msgspec", "numpy"), **figures, **budget.told})


if __name__ == "__main__":
    main()
