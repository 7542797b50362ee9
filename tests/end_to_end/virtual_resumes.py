"""Resumes in one process: config, data, tokenizer, checkpoints, loop and the command's frame are the real ones; the
trainer and the generators are doubles, whose weights are a hash of all that they were trained on.

`resumed(kind, seed, model, folder)` has a run uncut, the same run cut, something changed, and goes on: what comes of it
is the uncut run, or a sentence names what is other.
"""

import asyncio
import io
import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ductile.concurrency.structured import Pause
from ductile.config.reading.errors import ConfigError, show
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig, SFTConfig
from ductile.core.rollouts.provenance import KnownWeights
from ductile.observe import read_jsonl
from ductile.orchestrator.commands import compose
from ductile.orchestrator.commands.run_context import RunContext
from ductile.orchestrator.commands.sft import prepare_sft, run_batches
from ductile.orchestrator.ending.supervise import NOT_STARTED, supervise
from ductile.records import Generation, Manifest, StepReport
from ductile.roles import SlotLost
from ductile.trainer.lr_schedule import learning_rate
from tests.orchestrator.doubles import InProcessGraders, read, write
from tests.tiny import IM_END

NEVER = 1000
RL = """
model.name = "{base}"
seq_len = 96
max_steps = {max_steps}
output_dir = "{folder}"
cluster = {{ device = "cpu", component_placement = {{ actor = 0, rollout = 1 }} }}
ckpt = {{ interval = {interval}, keep_last = "None" }}
trainer.optim.lr = 0.001
trainer.scheduler = {scheduler}

[orchestrator]
batch_size = 8
rollouts_per_example = 2
n_minibatches = {n_minibatches}
max_async_level = {ahead}
shuffle = {shuffle}
num_samples_kept = 64
task = {{ type = "jsonl", path = "{data}", reward = "{reward}:score" }}
sampling.max_tokens = 8
eval = {{ num_examples = 4, interval = {eval_interval}, sampling.temperature = 0.0 }}
"""
SFT = """
model.name = "{base}"
data = {{ path = "{data}", batch_size = 4, seq_len = 64, shuffle = {shuffle} }}
max_steps = {max_steps}
output_dir = "{folder}"
cluster = {{ device = "cpu", component_placement = {{ actor = 0 }} }}
ckpt = {{ interval = {interval}, keep_last = "None" }}
optim.lr = 0.001
scheduler = {scheduler}
"""
SCHEDULES = (
    '{ type = "constant" }',
    '{ type = "linear", warmup_steps = 2 }',
    '{ type = "linear", warmup_steps = 0, decay_steps = 3 }',
    '{ type = "cosine", warmup_steps = 0.25 }',
)
STYLE = "{{ style or '' }}"
"""What chat templates begin with here: a variable that a run may set."""
REWARD = (
    "def score(row, completion):\n    return (sum(map(ord, completion)) * {factor} + int(row['solution'])) % 7 / 7\n"
)


@dataclass
class World:
    """The files of a run, and how it is configured."""

    folder: Path
    command: str
    draw: random.Random
    settings: dict[str, Any]
    flags: list[str] = field(default_factory=list)
    """What the run goes on with."""

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def data(self) -> Path:
        return self.folder / "data.jsonl"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def max_steps(self) -> int:
        return self.settings["max_steps"]

    def key(self, rl: str, sft: str) -> str:
        return rl if self.command == "rl" else sft

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_config(self, output_dir: Path) -> Path:
        file = self.folder / f"{output_dir.name}.toml"
        reward = self.folder / "reward.py"
        text = RL if self.command == "rl" else SFT
        file.write_text(text.format(base=self.base, data=self.data, folder=output_dir, reward=reward, **self.settings))
        return file

    def edit_json(self, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
        value = json.loads((self.base / name).read_text())
        edit(value)
        (self.base / name).write_text(json.dumps(value))


def make_world(folder: Path, command: str, model: Path, draw: random.Random) -> World:
    folder.mkdir(parents=True)
    shutil.copytree(model, folder / "base")
    settings = {
        "max_steps": 7,
        "interval": draw.choice([1, 2, NEVER]),
        "scheduler": draw.choice(SCHEDULES),
        "n_minibatches": draw.choice([1, 2]),
        "ahead": draw.choice([0, 1]),
        "shuffle": "true",
        "eval_interval": draw.choice(['"None"', "1", "2"]),
    }
    world = World(folder, command, draw, settings)
    world.write_rows(rows_of(command, 20))
    (folder / "reward.py").write_text(REWARD.format(factor=1))
    world.edit_json(
        "tokenizer_config.json", lambda settings: settings.update(chat_template=STYLE + settings["chat_template"])
    )
    return world


def rows_of(command: str, number: int, first: int = 0) -> list[dict[str, Any]]:
    answer = "solution" if command == "rl" else "completion"
    return [{"prompt": f"Q{n:02d}", answer: str(n * n)} for n in range(first, number)]


class Learner:
    """Trainer and generators. Completions are the same whenever they are asked for; held-out ones tell the weights."""

    num_ranks, micro_batches_per_rank, capacity = 1, 1, 16

    def __init__(self, prepared: Any, base: Path) -> None:
        self.config, self.base = prepared.trainer, base
        self.step, self.weights, self.version = 0, "untrained", 0
        self.trace: list[dict[str, Any]] = []
        """What each optimizer step was: its samples and its learning rate."""
        self.batch: list[str] = []
        self.is_lost = False
        self.pause = Pause()
        self.on_update: Callable[[], None] = lambda: None

    def _check(self) -> None:
        if self.is_lost:
            raise SlotLost("slot 0 (train, pid 7) was killed by SIGKILL")

    async def forward_backward(self, samples, seq_len):
        self._check()
        columns = ("token_ids", "loss_mask", "advantages", "weights")
        self.batch += [repr([list(getattr(sample, name)) for name in columns]) for sample in samples]

    async def optim_step(self, loss_denominator):
        self._check()
        config, model = self.config, self.config.model
        lr = learning_rate(config.scheduler, config.optim.lr, self.step, config.max_steps)
        how = config.optim.model_dump(exclude={"lr"}), config.loss.model_dump(), config.matmul_precision
        dtypes = model.optimization_dtype, model.compute_dtype, model.reduce_dtype
        self.trace.append({"samples": sorted(self.batch), "lr": lr})
        self.weights = _hash(self.weights, self.trace[-1], loss_denominator, how, dtypes)
        self.step, self.batch = self.step + 1, []
        self.on_update()
        return StepReport(self.step, 1.0, 0.5, lr, int(loss_denominator), {"skipped": 0.0})

    async def publish(self, version):
        self._check()
        return Manifest(version, "none", "", 0, 0, ())

    async def withdraw(self, version):
        pass

    async def receive(self, manifest):
        self.version = manifest.version
        return KnownWeights.of(manifest)

    async def save(self, path):
        self._check()
        dtype = self.config.model.optimization_dtype
        write(path, json.dumps([self.step, self.weights, self.trace, dtype]))

    async def load(self, path):
        self.step, self.weights, self.trace, dtype = json.loads(read(path))
        if dtype != self.config.model.optimization_dtype:
            self.weights = _hash(self.weights, "cast")

    async def export(self, path, dtype):
        self._check()
        shutil.copytree(self.base, path, dirs_exist_ok=True)
        write(path, self.weights)

    async def generate(self, request):
        await asyncio.sleep(0)
        held_out = request.id.startswith("eval/")
        member = request.id.split("/")[3]
        sampling = request.sampling.temperature, request.sampling.top_p
        said = _hash(list(request.prompt), member, sampling, self.weights if held_out else "")
        ids = (*(20 + ord(letter) % 10 for letter in said[:6]), IM_END)
        return Generation(request.id, ids, (-0.1,) * len(ids), (self.version,) * len(ids), "stop")


def _hash(*values: object) -> str:
    return blake2b(repr(values).encode(), digest_size=8).hexdigest()


class GradersHere(InProcessGraders):
    async def __aenter__(self):
        return self

    async def __aexit__(self, *failure):
        pass


@dataclass(frozen=True)
class Outcome:
    """What a life of a run came to."""

    code: int
    said: str
    trace: list[dict[str, Any]]
    weights: str
    evaluated: dict[int, float]
    steps: list[int]
    told: list[dict[str, Any]]
    """Events that say what is other."""
    exported: str
    summary: dict[str, Any]

    def same_run(self, other: "Outcome") -> bool:
        def of(each: Outcome):
            return each.trace, each.weights, each.evaluated, each.steps, each.exported

        return of(self) == of(other)


def live(world: World, words: list[str], folder: Path, cut: Callable[[Learner, Any], None]) -> Outcome:
    """One life of the run, by its command's words. cut: told of the learner and the session before it begins."""
    for name in [name for name in sys.modules if name.startswith("ductile_import.")]:
        del sys.modules[name]  # a new process would read the file again
    learners: list[Learner] = []

    async def rl(config, prepared, session):
        learner = _learner(prepared, session)
        with _graders_here(prepared):
            await compose.run_loop(prepared, learner, learner, None, _context(session))
        return ""

    async def sft(config, prepared, session):
        await run_batches(prepared, _learner(prepared, session), _context(session))
        return ""

    def _learner(prepared, session) -> Learner:
        learners.append(Learner(prepared, Path(prepared.trainer.model.name)))
        cut(learners[-1], session)
        return learners[-1]

    root, prepare, run = (RLConfig, compose.prepare, rl) if world.command == "rl" else (SFTConfig, prepare_sft, sft)
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            config = parse(root, words).config
            code = supervise(
                world.command,
                config,
                prepare,
                lambda prepared: prepared.schedule.max_steps if world.command == "rl" else prepared.max_steps,
                run,
                lambda prepared: prepared.began,
            )
        except ConfigError as error:
            code = NOT_STARTED
            print(error)
    metrics = read_jsonl(folder / "metrics.jsonl")
    summary = folder / "summary.json"
    return Outcome(
        code,
        said.getvalue(),
        learners[-1].trace if learners else [],
        learners[-1].weights if learners else "",
        {row["step"]: row["eval_reward"] for row in metrics if "eval_reward" in row},
        [row["step"] for row in metrics],
        [row for row in read_jsonl(folder / "events.jsonl") if row["kind"] == "resumed_otherwise"],
        read(str(folder / "model")) if (folder / "model" / "shard").exists() else "",
        json.loads(summary.read_text()) if summary.exists() else {},
    )


def _context(session) -> RunContext:
    return RunContext(session.record, session.interrupt.graceful)


@contextmanager
def _graders_here(prepared) -> Iterator[None]:
    graders_of, compose.graders_of = compose.graders_of, lambda *_: GradersHere(prepared.tasks)
    try:
        yield
    finally:
        compose.graders_of = graders_of


def uncut(learner: Learner, session: Any) -> None:
    pass


def stopped_at(update: int, learner: Learner, session: Any) -> None:
    """Ctrl-C at an optimizer step."""

    def stop() -> None:
        if learner.step == update:
            session.interrupt.graceful.set()

    learner.on_update = stop


def lost_at(update: int, learner: Learner, session: Any) -> None:
    """The trainer dies at an optimizer step: what was not saved is lost."""

    def lose() -> None:
        learner.is_lost = learner.step == update

    learner.on_update = lose


@dataclass(frozen=True)
class Kind:
    """A kind of change between a cut and the resume."""

    name: str
    change: Callable[[World], str | None]
    """Changes files, adds flags; returns the name of what is other, as a sentence has it. None: nothing is."""
    commands: tuple[str, ...] = ("rl", "sft")
    of_meaning: bool = True
    """Whether the checkpoint's meaning tells of it."""


def _flag(rl: str, sft: str, *values: str) -> Callable[[World], str]:
    """Another value of a key, in one command or the other."""

    def change(world: World) -> str:
        key = world.key(rl, sft)
        world.flags += [f"--{key.replace('_', '-')}", world.draw.choice(values)]
        return key

    return change


def _rows(edit: Callable[[World, list[dict[str, Any]]], list[dict[str, Any]]], fact: str, of_sft: str):
    def change(world: World) -> str:
        world.write_rows(edit(world, read_jsonl(world.data)))
        return world.key(fact, of_sft)

    return change


def _grow(world: World, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows + rows_of(world.command, 20 + world.draw.choice([1, 4, 20]), first=20)


def _shrink(world: World, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows[: -world.draw.choice([1, 4, 8])]


def _reorder(world: World, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(reversed(rows))


def _edit(world: World, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows[world.draw.randrange(8)]["prompt"] += "?"
    return rows


def _solve(world: World, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"solution": str(int(row["solution"]) + n % 2)} for n, row in enumerate(rows)]


def _same_rows(world: World) -> None:
    """The file is written by another tool, and lies elsewhere."""
    elsewhere = world.folder / "elsewhere.jsonl"
    rows = [dict(sorted(row.items(), reverse=True)) for row in read_jsonl(world.data)]
    elsewhere.write_text("\n\n".join(json.dumps(row, indent=None, separators=(",", ":")) for row in rows))
    world.data.unlink()
    world.flags += [f"--{world.key('orchestrator.task.path', 'data.path')}", str(elsewhere)]


def _no_shuffle(world: World) -> str:
    key = world.key("orchestrator.shuffle", "data.shuffle")
    world.flags.append(f"--no-{key}")
    return key


def _template(world: World) -> str:
    def edit(settings: dict[str, Any]) -> None:
        settings["chat_template"] = settings["chat_template"].replace("'\\n'", "'\\n '", 1)

    world.edit_json("tokenizer_config.json", edit)
    return "the fingerprint of the chat template"


def _variables(world: World) -> str:
    world.flags += ["--model.chat-template-kwargs", '{"style": 1}']
    return "model.chat_template_kwargs"


def _tokenizer(world: World) -> str:
    def edit(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]

    world.edit_json("tokenizer.json", edit)
    return "the fingerprint of the tokenizer"


def _rewritten_tokenizer(world: World) -> None:
    """The same tokenizer, as another tool would write it."""
    (world.base / "tokenizer.json").write_text(json.dumps(json.loads((world.base / "tokenizer.json").read_text())))


def _other_base(world: World) -> str:
    weights = world.base / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = bytes(4)
    weights.write_bytes(content)
    return "the fingerprint of the base model's weights"


def _rope(world: World) -> str:
    world.edit_json("config.json", lambda config: config.update(rms_norm_eps=1e-3))
    return "config.json rms_norm_eps"


def _moved_base(world: World) -> None:
    world.base.rename(world.folder / "moved")
    world.flags += ["--model.name", str(world.folder / "moved")]


def _reward(world: World) -> str:
    (world.folder / "reward.py").write_text(REWARD.format(factor=3))
    return "orchestrator.task.reward"


def _moved_reward(world: World) -> None:
    (world.folder / "code").mkdir()
    moved = (world.folder / "reward.py").rename(world.folder / "code" / "reward.py")
    world.flags += ["--orchestrator.task.reward", f"{moved}:score"]


def _held_out_of_its_own(world: World) -> str:
    file = world.folder / "eval.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of("rl", 44, first=40)))
    task = {"type": "jsonl", "path": str(file), "reward": f"{world.folder / 'reward.py'}:score"}
    world.flags += ["--orchestrator.eval.task", json.dumps(task)]
    return "the number of examples to train on"


def _loss(world: World) -> str:
    world.flags += ["--trainer.loss.kl-tau", "0.5"]
    return "trainer.loss.kl_tau"


def _schedule(world: World) -> str:
    key = world.key("trainer.scheduler", "scheduler")
    now = '{"type": "linear", "warmup_steps": 1}' if "cosine" in world.settings["scheduler"] else '{"type": "cosine"}'
    world.flags += [f"--{key}", now]
    return f"{key}.type"


def _less_steps(world: World) -> str:
    world.flags += ["--max-steps", "6"]
    return "max_steps"


def _quiet(*flags: str, rl: tuple[str, ...] = (), sft: tuple[str, ...] = ()) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.flags += [*flags, *(rl if world.command == "rl" else sft)]

    return change


def _copied(world: World) -> str:
    shutil.copytree(world.run, world.folder / "copy")
    world.settings["resume_in"] = world.folder / "copy"
    return f"--output-dir {world.folder / 'copy'}"


def _copied_and_said(world: World) -> None:
    _copied(world)
    world.flags += ["--output-dir", str(world.folder / "copy")]


def _moved(world: World) -> None:
    world.run.rename(world.folder / "moved_run")
    world.settings["resume_in"] = world.folder / "moved_run"
    world.flags += ["--output-dir", str(world.folder / "moved_run")]


OTHER_EPSILON = _flag("trainer.optim.eps", "optim.eps", "1e-3")
QUIET = (
    Kind("nothing", lambda world: None),
    Kind("data written anew elsewhere", _same_rows),
    Kind("tokenizer written anew", _rewritten_tokenizer),
    Kind("base model moved", _moved_base),
    Kind("reward moved", _moved_reward, ("rl",)),
    Kind("slots", _quiet(rl=("--cluster.component-placement", '{"actor": "0-1", "rollout": "2-3"}'),
                         sft=("--cluster.component-placement", '{"actor": "0-1"}'))),
    Kind("layout", _quiet(rl=("--trainer.model.reshard-after-forward", "false", "--inference.max-num-seqs", "8"),
                          sft=("--model.reduce-every", "step"))),
    Kind("sinks", _quiet("--tensorboard", rl=("--orchestrator.num-samples-kept", "3"))),
    Kind("saving", _quiet("--ckpt.interval", "3", "--no-ckpt.export-model")),
    Kind("folder copied and named", _copied_and_said),
    Kind("folder moved and named", _moved),
)  # fmt: skip
"""Changes that are none: the run goes on as the uncut one, and nothing is said of them."""
OTHER = (
    Kind("data grew", _rows(_grow, "the number of examples", "the number of samples")),
    Kind("data shrank", _rows(_shrink, "the number of examples", "the number of samples")),
    Kind("data reordered", _rows(_reorder, "the fingerprint of the prompts", "the fingerprint of the conversations")),
    Kind("data edited", _rows(_edit, "the fingerprint of the prompts", "the fingerprint of the conversations")),
    Kind("solutions edited", _rows(_solve, "the fingerprint of the rows", ""), ("rl",)),
    Kind("seed", _flag("orchestrator.seed", "seed", "1", "7")),
    Kind("shuffle", _no_shuffle),
    Kind("held-out number", _flag("orchestrator.eval.num_examples", "", "2", "8"), ("rl",)),
    Kind("held-out file", _held_out_of_its_own, ("rl",)),
    Kind("how held-out rewards are sampled", _flag("orchestrator.eval.sampling.temperature", "", "0.5"), ("rl",)),
    Kind("batch size", _flag("orchestrator.batch_size", "data.batch_size", "12", "16")),
    Kind("group size", _flag("orchestrator.rollouts_per_example", "", "4"), ("rl",)),
    Kind("minibatches", _flag("orchestrator.n_minibatches", "", "4"), ("rl",)),
    Kind("dtype", _flag("trainer.model.optimization_dtype", "model.optimization_dtype", "bfloat16")),
    Kind("compute dtype", _flag("trainer.model.compute_dtype", "model.compute_dtype", "bfloat16")),
    Kind("lr", _flag("trainer.optim.lr", "optim.lr", "0.01", "0.0001")),
    Kind("schedule", _schedule),
    Kind("more steps", _flag("max_steps", "max_steps", "9", "12")),
    Kind("less steps", _less_steps),
    Kind("optimizer", _flag("trainer.optim.type", "optim.type", "sgd")),
    Kind("optimizer's settings", OTHER_EPSILON),
    Kind("loss", _loss, ("rl",)),
    Kind("advantage", _flag("orchestrator.advantage.type", "", "grpo"), ("rl",)),
    Kind("temperature", _flag("orchestrator.sampling.temperature", "", "0.7"), ("rl",)),
    Kind("loss on", _flag("", "data.loss_on", "all"), ("sft",)),
    Kind("seq_len", _flag("", "data.seq_len", "24"), ("sft",)),
    Kind("template", _template),
    Kind("template's variables", _variables),
    Kind("tokenizer", _tokenizer),
    Kind("base model", _other_base),
    Kind("model's config", _rope),
    Kind("reward", _reward, ("rl",)),
    Kind("folder copied", _copied, of_meaning=False),
)  # fmt: skip
KINDS = (*QUIET, *OTHER)
WAYS = ("stopped", "lost", "earlier")
BOTH_VALUES = re.compile(r"(?:was|to be) (\S.*?) (?:up to step \d+ )?and is (\S.*?)(?: now|\.? \(|\.)")


def resumed(kind: Kind, seed: int, model: Path, folder: Path) -> str:
    """Returns how it went on: "equal", "told" or "refused". Raises AssertionError where it is another run in
    silence."""
    draw = random.Random(f"{kind.name}/{seed}")
    world = make_world(folder, kind.commands[seed % len(kind.commands)], model, draw)
    whole = live(world, ["@", str(world.write_config(folder / "whole"))], folder / "whole", uncut)
    assert whole.code == 0, whole.said
    way = WAYS[seed % len(WAYS)]
    config, per_step = world.write_config(world.run), world.settings["n_minibatches"] if world.command == "rl" else 1
    if way == "lost" and world.settings["interval"] == NEVER:
        config.write_text(config.read_text().replace(f"interval = {NEVER}", "interval = 1"))
    at = draw.randint(3, world.max_steps - 2) * per_step
    first = live(world, ["@", str(config)], world.run, partial(lost_at if way == "lost" else stopped_at, at))
    assert first.code in (1, 130), first.said
    saved = sorted(int(path.name.removeprefix("step_")) for path in (world.run / "state").glob("step_*"))
    step = draw.choice(saved) if way == "earlier" else saved[-1]
    key = kind.change(world)
    run = world.settings.get("resume_in", world.run)
    flags = ["--ckpt.resume-step", str(step)] if way == "earlier" else ["--resume"]
    again = live(world, ["@", str(run / "config.toml"), *flags, *world.flags], run, uncut)
    print(f"{kind.name}, {world.command}, {way} after {step}: {again.code} {[row['sentence'] for row in again.told]}")
    return judge(kind, key, whole, again)


def judge(kind: Kind, key: str | None, whole: Outcome, again: Outcome) -> str:
    """Returns "equal", "told" or "refused"."""
    if again.code == NOT_STARTED:
        assert key, f"refused, and nothing is other:\n{again.said}"
        assert _names(key, again.said), f"refused, and {key} is not named with both values:\n{again.said}"
        return "refused"
    assert again.code == 0, again.said
    last = again.steps[-1]
    assert again.summary["steps"] == last, "the summary is of the run's end"
    exports = kind.name != "saving"
    if again.exported and exports:
        assert again.exported == again.weights, "the model that is exported is the one that was trained"
    if again.summary.get("eval_step_last") is not None:
        assert again.summary["eval_step_last"] == last, "the last model has been measured"
    told = " ".join(row["sentence"] for row in again.told)
    if key is None:
        assert not again.told, f"nothing is other, and the user is told: {told}"
        assert again.same_run(whole if exports else replace(whole, exported=again.exported)), "it is the uncut run"
        return "equal"
    for row in again.told:
        shown = [show(row.get(name)) for name in ("before", "now")] if row["key"] != "lr" else []
        assert all(value in row["sentence"] for value in shown), row
    assert _names(key, told), f"{key} is other, and is not named with both values: {told or 'nothing is said'}"
    return "told"


def _names(key: str, said: str) -> bool:
    """Whether a sentence has the key and two values that differ; of a folder its name is enough."""
    if key.startswith("--output-dir"):
        return key in said
    sentences = [text for text in re.split(r"(?<=[.:]) (?=[A-Z`a-z])", said) if key.lower() in text.lower()]
    found = [match.groups() for text in sentences for match in BOTH_VALUES.finditer(text)]
    return any(before != now for before, now in found)
