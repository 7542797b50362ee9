"""From a config to a run, with the trainer and the generators in memory and everything else real: tokenizer, task,
graders, files."""

import asyncio
import json
import shutil

import pytest

from ductile.config.reading.imports import ImportPathError
from ductile.config.schema.orchestrator import SamplingConfig, to_sampling
from ductile.config.schema.run import OrchestratorRunConfig, RLConfig
from ductile.core.rollouts.provenance import KnownWeights
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.commands.compose import prepare, run_loop
from ductile.orchestrator.commands.rehearse import rehearse
from ductile.orchestrator.commands.rollout_only import prepare_rollout_only, run_rollout_only, write_rollouts
from ductile.orchestrator.commands.run_context import RunContext
from ductile.orchestrator.ending.progress import CheckpointError
from ductile.orchestrator.ending.run_until import SlotDied
from ductile.orchestrator.ending.saving import ExportFailed
from ductile.records import Generation, Manifest, Prompt, Rollout, RolloutGroup, StepReport
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import Tokenizer
from tests.orchestrator.doubles import read, write
from tests.tiny import IM_END, make_tokenizer_files, may_think, writes_date

BASE = {
    "max_steps": 3,
    "orchestrator": {
        "task": {"type": "builtin", "name": "addition", "config": {"max_value": 9}, "size": 40},
        "batch_size": 8,
        "rollouts_per_example": 4,
        "eval": {"num_examples": 4},
    },
}


@pytest.fixture
def folder(tmp_path):
    return make_tokenizer_files(tmp_path / "m")


def config(tmp_path, folder, root=RLConfig, **changes):
    tree = json.loads(json.dumps(BASE)) | {"output_dir": str(tmp_path / "run")}
    tree["inference"] = {"model": {"name": str(folder), "max_model_len": 64}}
    tree["trainer"] = {"model": {"name": str(folder), "seq_len": 64}}
    for path, value in changes.items():
        *parents, last = path.split("__")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return root.model_validate(tree)


class Learns:
    """Trainer and generators in one: the more steps it took, the more sums are right."""

    num_ranks, micro_batches_per_rank, capacity = 1, 1, 16

    def __init__(self, folder):
        self.tokenizer, self.step, self.version, self.calls, self.samples = Tokenizer.from_folder(folder), 0, 0, [], 0
        self.slots = {"train": (0,), "generate": (1,)}

    async def forward_backward(self, samples, seq_len):
        self.samples += len(samples)

    async def optim_step(self, loss_denominator):
        self.step += 1
        return StepReport(self.step, 0.5, 1.0, 1e-3, int(loss_denominator), {"entropy": 0.1})

    async def publish(self, version):
        return Manifest(version, "none", "", 0, 0, ())

    async def withdraw(self, version):
        pass

    async def save(self, path):
        self.slots = {"train": (0, 2), "generate": (1,)}  # it has grown by then
        write(path, str(self.step))

    async def load(self, path):
        self.step = int(read(path))

    async def export(self, path, dtype):
        self.calls.append(path)
        write(path, "model")

    async def receive(self, manifest):
        self.version = manifest.version
        return KnownWeights.of(manifest)

    async def generate(self, request):
        text = self.tokenizer.decode(request.prompt)
        a, b = text.split("\n")[1].rstrip("=").split("+")
        member = int(request.id.split("/")[3])
        right = member <= self.version
        self.stop_token_ids = request.sampling.stop_token_ids
        ids = (*self.tokenizer.encode(str(int(a) + int(b)) if right else "no"), IM_END)
        await asyncio.sleep(0)
        return Generation(request.id, ids, (-0.1,) * len(ids), (self.version,) * len(ids), "stop")


def rl(config, folder, stop=None, roles_of=Learns):
    async def go():
        prepared = prepare(config)
        record, roles = Recorder(prepared.folder), roles_of(folder)
        try:
            context = RunContext(record, stop or asyncio.Event(), lambda: roles.slots)
            return roles, await run_loop(prepared, roles, roles, None, context)
        finally:
            record.close()

    return asyncio.run(go())


def test_a_whole_run(tmp_path, folder):
    _, result = rl(config(tmp_path, folder), folder)
    run = tmp_path / "run"
    assert result.summary["steps"] == 3
    assert (run / "model" / "shard").exists()
    assert sorted(path.name for path in (run / "state").iterdir()) == ["step_3"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary == result.summary
    assert {
        "eval_reward_first",
        "eval_reward_last",
        "steps",
        "wall_s",
        "tokens_per_s_generate",
        "tokens_per_s_train",
        "slots",
    } <= summary.keys()
    assert summary["slots"] == {"train": [0, 2], "generate": [1]}, "those of the end"
    assert summary["steps"] == 3
    assert result.last is not None
    assert len(result.last.samples) == 3
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert summary["eval_reward_first"] == rows[0]["eval_reward"]
    assert rows[1]["reward/is_number"] > 0
    assert rows[1]["train/entropy"] == 0.1
    assert rows[3]["reward_mean"] > rows[1]["reward_mean"]


def test_a_run_whose_folder_is_removed_counts_what_it_did(tmp_path, folder):
    run = tmp_path / "run"

    class Removed(Learns):
        async def optim_step(self, loss_denominator):
            if self.step == 1:
                shutil.rmtree(run)
            return await super().optim_step(loss_denominator)

    _, result = rl(config(tmp_path, folder), folder, roles_of=Removed)
    assert result.summary["steps"] == 3
    assert result.summary["eval_step_first"] == 0
    assert not (run / "summary.json").exists()


def test_held_out_examples_are_never_trained_on(tmp_path, folder):
    prepared = prepare(config(tmp_path, folder))
    assert [prompt.example for prompt in prepared.eval_prompts] == [36, 37, 38, 39]
    assert list(prepared.train_examples) == list(range(36))
    own = {"type": "builtin", "name": "reverse", "size": 3}
    prepared = prepare(config(tmp_path, folder, orchestrator__eval__task=own))
    assert [prompt.task for prompt in prepared.eval_prompts] == ["eval"] * 3
    assert len(prepared.train_examples) == 40


def test_the_trainer_is_told_of_optimizer_steps(tmp_path, folder):
    prepared = prepare(config(tmp_path, folder, orchestrator__n_minibatches=2))
    assert prepared.schedule.max_steps == 3
    assert prepared.trainer.max_steps == 6
    roles, _ = rl(config(tmp_path, folder, orchestrator__n_minibatches=2), folder)
    assert roles.step <= 6


def test_one_pass_over_the_examples_by_default(tmp_path, folder):
    prepared = prepare(config(tmp_path, folder, max_steps=None))
    assert (prepared.schedule.max_steps, prepared.notes()) == (18, [])
    rest = prepare(config(tmp_path, folder, max_steps=None, orchestrator__eval__num_examples=5))
    assert rest.notes() == ["One pass is 17 steps of 2, and there are 35 prompts: 1 of them is not taken."]
    for branch in ("trainer", "orchestrator"):
        assert prepare(config(tmp_path, folder, max_steps=None, **{f"{branch}__max_steps": 5})).schedule.max_steps == 5


def test_the_date_that_a_template_writes_is_told_at_the_start_and_kept(tmp_path, folder, monkeypatch):
    set_day = writes_date(folder, monkeypatch)
    set_day(27)
    rl(config(tmp_path, folder), folder)
    (data,) = [row for row in read_jsonl(tmp_path / "run/events.jsonl") if row["kind"] == "data_noted"]
    assert data["sentence"].startswith("The chat template writes today's date ('27 Nov 2026')")
    set_day(28)
    changes = prepare(config(tmp_path, folder, max_steps=4, ckpt__resume_step=-1)).began.changes
    assert (["27 Nov 2026"], ["28 Nov 2026"]) in [(change.before, change.now) for change in changes]


def test_resume_goes_on_where_the_run_was(tmp_path, folder):
    rl(config(tmp_path, folder, ckpt__interval=1, ckpt__keep_last=None), folder)
    later = config(tmp_path, folder, max_steps=5, ckpt__resume_step=2)
    assert prepare(later).progress.step == 2
    _, result = rl(later, folder)
    assert result.summary["steps"] == 5
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert result.summary["eval_reward_first"] == rows[0]["eval_reward"]
    assert "Resumed after step 2" in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize("last", [2, 4])
def test_the_evaluation_that_was_due_is_done_first(tmp_path, folder, last):
    """Ctrl-C cuts it short; also the last one, after which there is no step to do."""
    stop = asyncio.Event()

    class Stopped(Learns):
        async def optim_step(self, loss_denominator):
            if self.step + 1 == last:
                stop.set()
            return await super().optim_step(loss_denominator)

    settings = {"max_steps": 4, "orchestrator__eval__interval": 2}
    evaluated = tmp_path / "run" / "metrics.jsonl"
    rl(config(tmp_path, folder, **settings), folder, stop, Stopped)
    assert [row["step"] for row in read_jsonl(evaluated) if "eval_reward" in row] == [0, 2, 4][: last // 2]
    again = config(tmp_path, folder, ckpt__resume_step=-1, **settings)
    assert prepare(again).began.owes_evaluation
    _, result = rl(again, folder)
    rows = read_jsonl(evaluated)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2, 4]
    assert "reward_mean" in rows[last], "what the row had, it has"
    assert result.summary["eval_step_last"] == result.summary["steps"] == 4
    assert not prepare(again).began.owes_evaluation


def test_the_summary_compares_held_out_rewards_of_one_set(tmp_path, folder):
    rl(config(tmp_path, folder), folder)
    own = {"type": "builtin", "name": "addition", "config": {"max_value": 9}, "size": 4, "seed": 5}
    later = {"max_steps": 5, "ckpt__resume_step": -1, "orchestrator__task__size": 36}
    with pytest.raises(CheckpointError, match=r"The number of examples .* was 36 up to step 3 and is 32 now"):
        prepare(config(tmp_path, folder, **later))
    _, result = rl(config(tmp_path, folder, orchestrator__eval__task=own, **later), folder)
    assert result.summary["eval_step_first"] == result.summary["eval_step_last"] == 5
    told = [row["key"] for row in read_jsonl(tmp_path / "run" / "events.jsonl") if row["kind"] == "resumed_otherwise"]
    assert set(told) == {"held_out", "max_steps", "orchestrator.task.size"}


def test_a_resume_with_no_step_to_do_writes_the_model_that_failed(tmp_path, folder):
    class NoRoom(Learns):
        async def export(self, path, dtype):
            raise OSError(28, "No space left on device")

    with pytest.raises(ExportFailed, match="The model of step 3 cannot be written"):
        rl(config(tmp_path, folder), folder, roles_of=NoRoom)
    _, result = rl(config(tmp_path, folder, ckpt__resume_step=-1), folder)
    assert result.summary["steps"] == 3
    assert result.model_folder == tmp_path / "run" / "model"
    assert read(str(result.model_folder)) == "model"


def test_a_run_goes_on_with_the_reference_that_it_began_with(tmp_path, folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(100_000))
    loss = {"type": "grpo", "kl_coef": 0.1}
    rl(config(tmp_path, folder, trainer__loss=loss, ckpt__interval=1), folder)
    later = config(tmp_path, folder, trainer__loss=loss, max_steps=5, ckpt__resume_step=-1)
    assert prepare(later).progress.step == 3
    weights.write_bytes(bytes(50_000) + bytes([1] * 50_000))
    with pytest.raises(
        CheckpointError, match=r"other weights than those that .*step_3 was trained with as the KL term's"
    ):
        prepare(later)
    without = config(tmp_path, folder, max_steps=5, ckpt__resume_step=-1)
    assert prepare(without).progress.step == 3  # nothing compares with them


def test_a_death_while_the_checkpoint_is_read_ends_the_run(tmp_path, folder):
    class Stuck(Learns):
        async def load(self, path):
            await asyncio.Event().wait()

    async def death():
        return "slot 1 (generate, pid 7) was killed by SIGKILL while idle"

    async def story():
        prepared, roles = prepare(config(tmp_path, folder, ckpt__resume_step=3)), Stuck(folder)
        record = Recorder(tmp_path / "run")
        context = RunContext(record, asyncio.Event(), lambda: roles.slots, death=death)
        await run_loop(prepared, roles, roles, None, context)

    rl(config(tmp_path, folder), folder)
    with pytest.raises(SlotDied, match="slot 1"):
        asyncio.run(asyncio.wait_for(story(), 100))


def test_resuming_a_run_without_a_checkpoint_starts_it(tmp_path, folder):
    run = tmp_path / "run"
    killed = Recorder(run)  # in its second step, before the first save
    killed.metrics(0, {"eval_reward": 0.0})
    killed.metrics(1, {"reward_mean": 0.0})
    killed.close()
    _, result = rl(config(tmp_path, folder, ckpt__resume_step=-1), folder)
    assert result.summary["steps"] == 3
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2, 3]
    assert (
        "yet: started from the beginning, and the metrics of its steps are written anew."
        in (run / "events.jsonl").read_text()
    )
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 9; there are? 3"):
        prepare(config(tmp_path, folder, ckpt__resume_step=9))


def test_bench_takes_a_few_steps_and_saves_nothing(tmp_path, folder):
    _, result = rl(config(tmp_path, folder, bench={}), folder)
    assert result.summary["steps"] == 5, "four, and one that is traced"
    assert result.model_folder is None
    assert not (tmp_path / "run" / "state").exists()


@pytest.mark.parametrize(
    "loss",
    [
        {"type": "grpo", "kl_coef": 0.1},
        {"type": "default", "kl_coef": 0.1},
        {"type": "ipo", "kl_coef": 0.1},
        {"type": "custom", "import_path": "a.b", "needs_reference": True},
    ],
    ids=lambda loss: loss["type"],
)
def test_a_reference_is_asked_for_when_the_loss_needs_it(tmp_path, folder, loss):
    from ductile.orchestrator.commands.compose import _sample_builder

    loss = {**loss, "aggregation": "seq_mean_token_sum"}
    sample_builder = _sample_builder(prepare(config(tmp_path, folder, trainer__loss=loss)), None)
    assert sample_builder._needs_reference
    assert sample_builder._loss_aggregation == "seq_mean_token_sum"


def custom_advantage(rewards, group):
    return [0.5 for _ in rewards]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"orchestrator__task": {"type": "builtin", "name": "adition"}}, TaskError, "did you mean"),
        ({"inference__model__max_model_len": 8}, TaskError, "every held-out prompt has 8 tokens or more"),
        (
            {"orchestrator__advantage": {"type": "custom", "import_path": "tests.orchestrator.test_compose.BASE"}},
            ImportPathError,
            "is not a function",
        ),
    ],
)
def test_what_is_wrong_is_found_before_anything_starts(tmp_path, folder, changes, error, message):
    with pytest.raises(error, match=message):
        prepare(config(tmp_path, folder, **changes))


def test_a_custom_advantage(tmp_path, folder):
    advantage = {"type": "custom", "import_path": "tests.orchestrator.test_compose.custom_advantage"}
    assert prepare(config(tmp_path, folder, orchestrator__advantage=advantage)).advantage([1, 2], None) == [0.5, 0.5]


@pytest.mark.parametrize(("variables", "thinks"), [({}, True), ({"enable_thinking": False}, False)])
def test_variables_of_the_chat_template_reach_every_prompt(tmp_path, folder, variables, thinks):
    may_think(folder)
    rl = prepare(config(tmp_path, folder, inference__model__chat_template_kwargs=variables))
    tree = BASE["orchestrator"] | {"model": {"name": str(folder), "chat_template_kwargs": variables}}
    alone = prepare_rollout_only(OrchestratorRunConfig.model_validate(tree | {"output_dir": str(tmp_path / "alone")}))
    prompt = [{"role": "user", "content": "1+1="}]
    prompts = [prompt.token_ids for prompt in rl.eval_prompts]
    prompts += [tokenizer.apply_chat_template(prompt) for tokenizer in (rl.tokenizer, alone.tokenizer)]
    assert [rl.tokenizer.decode(prompt).endswith("assistant\n") for prompt in prompts] == [thinks] * 6


def test_the_orchestrator_alone(tmp_path, folder):
    tree = BASE["orchestrator"] | {"model": {"name": str(folder)}, "max_steps": 2, "output_dir": str(tmp_path / "run")}

    async def go():
        prepared = prepare_rollout_only(OrchestratorRunConfig.model_validate(tree))
        record = Recorder(tmp_path / "run")
        server = Learns(folder)
        summary = await run_rollout_only(prepared, server, record, asyncio.Event())
        assert server.stop_token_ids == (IM_END,), "the server may know of no end of turn"
        record.close()
        return summary

    summary = asyncio.run(go())
    assert summary["steps"] == 2
    assert summary["reward_mean"] == 0.25  # of four completions of a prompt the first is right
    rows = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert len(rows) == 16
    assert {"prompt", "completion", "reward", "token_ids", "logprobs", "prompt_token_ids", "step"} <= rows[0].keys()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_half_a_character_in_a_failed_reward_is_written_down(tmp_path, folder):
    tree = BASE["orchestrator"] | {"model": {"name": str(folder)}}
    prepared = prepare_rollout_only(OrchestratorRunConfig.model_validate(tree))
    rollout = Rollout((7,), (True,), (0.0,), (0,), "stop", None, error="raised KeyError: '\ud83d'")
    group = RolloutGroup(Prompt("train/0/0", "train", 0, (3,)), (rollout,))
    write_rollouts(tmp_path / "rollouts.jsonl", 1, [group], prepared)
    assert read_jsonl(tmp_path / "rollouts.jsonl")[0]["error"] == "raised KeyError: '\ud83d'"


def test_every_key_of_sampling_reaches_the_generator():
    given = SamplingConfig(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        max_tokens=9,
        seed=3,
        stop=["x"],
        stop_token_ids=[4],
        ignore_eos=True,
        skip_special_tokens=True,
        include_stop_str_in_output=True,
    )
    sampling = to_sampling(given)
    assert given.model_dump() == {name: getattr(sampling, name) for name in SamplingConfig.model_fields} | {
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def test_top_k_0_keeps_all_tokens():
    assert to_sampling(SamplingConfig(top_k=0)) == to_sampling(SamplingConfig())
    assert to_sampling(SamplingConfig()).top_k == -1


def test_a_rehearsal_tells_what_the_template_opens_for_the_policy(tmp_path, folder):
    template = tmp_path / "opens.jinja"
    turns = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    template.write_text(turns + "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}")
    assert rehearse(config(tmp_path, folder)).about.sentence == ""
    about = rehearse(config(tmp_path, folder, inference__model__chat_template=str(template))).about
    assert about.sentence == "Rewards are given completions that begin with '<think>\\n', as prompts end."
    assert about.first.endswith("<|im_start|><think>\n")
