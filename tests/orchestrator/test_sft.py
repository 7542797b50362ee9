import asyncio
import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from ductile.config.schema.run import SFTConfig, TrainerRunConfig
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.commands.run_context import RunContext
from ductile.orchestrator.commands.sft import prepare_fake, prepare_sft, run_batches
from ductile.orchestrator.commands.sft_data import fake_samples, read_conversations, tokenise
from ductile.orchestrator.ending.progress import CheckpointError
from ductile.orchestrator.ending.saving import ExportFailed
from ductile.orchestrator.loop.skipped_steps import Diverged
from ductile.records import StepReport
from ductile.tasks.rows import conversation_of
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import Tokenizer
from tests.config.stories import MODEL
from tests.orchestrator.doubles import read, write
from tests.tiny import make_tokenizer_files, may_think, writes_date


@pytest.fixture
def folder(tmp_path):
    folder = make_tokenizer_files(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 102}))
    return folder


@pytest.fixture
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


def tokens_of(tokenizer, *messages, loss_on="assistant", **fields):
    return tokenise("rows.jsonl:1", {"messages": list(messages), **fields}, tokenizer, loss_on)


def trained_text(tokenizer, tokens):
    kept = [token for token, trained in zip(tokens.ids, tokens.trained, strict=True) if trained]
    return tokenizer.decode(kept, skip_special_tokens=False)


CHAT = [
    {"role": "system", "content": "Short."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "me"},
]


def test_completions_are_trained_and_nothing_else(tokenizer):
    tokens = tokens_of(tokenizer, *CHAT)
    assert tokens.ids == tokenizer.apply_chat_template(CHAT, False)
    assert trained_text(tokenizer, tokens) == "yo<|im_end|>me<|im_end|>"


def test_a_base_model_learns_to_end_its_turns_as_the_template_does(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|pad|>"}))
    base = Tokenizer.from_folder(folder)
    assert trained_text(base, tokens_of(base, *CHAT)) == "yo<|im_end|>me<|im_end|>"


def test_an_end_token_that_the_vocabulary_lacks_ends_no_turn(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [100000, -1]}')
    padded = Tokenizer.from_folder(folder)
    assert trained_text(padded, tokenise("f:1", {"text": "once"}, padded, "all")) == "nce<|im_end|>"
    assert trained_text(padded, tokens_of(padded, *CHAT)) == "yo<|im_end|>me<|im_end|>"


def test_white_space_that_the_template_cuts_is_not_trained(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings["chat_template"].replace("message['content']", "message['content'] | trim")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    chat = [*CHAT[:2], {"role": "assistant", "content": "\nyo  "}]
    tokenizer = Tokenizer.from_folder(folder)
    assert trained_text(tokenizer, tokens_of(tokenizer, *chat)) == "yo<|im_end|>"


def test_variables_of_the_chat_template_reach_every_sample(tmp_path, folder):
    data = {"type": "sft", "path": str(tmp_path / "rows.jsonl"), "batch_size": 1, "seq_len": 64}
    settings = json.loads((may_think(folder) / "tokenizer_config.json").read_text())
    template = settings["chat_template"].replace("'<|im_end|>'", "('' if enable_thinking else '!') + '<|im_end|>'")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    model = {"name": str(folder), "chat_template_kwargs": {"enable_thinking": False}}
    (sample,) = prepare_sft(config(tmp_path, folder, data=data, model=model)).batch(0)
    said = Tokenizer.from_folder(folder).decode(sample.token_ids)
    assert said.count("!") == 3  # the completion's own, and one at the end of each message


def test_everything_is_trained_when_asked_for(tokenizer):
    tokens = tokens_of(tokenizer, *CHAT, loss_on="all")
    assert tokens.trained == [False] + [True] * (len(tokens.ids) - 1)


def test_what_follows_the_last_completion_is_not_trained(tokenizer):
    longer = tokens_of(tokenizer, *CHAT, {"role": "user", "content": "bye"})
    assert trained_text(tokenizer, longer) == trained_text(tokenizer, tokens_of(tokenizer, *CHAT))


def test_a_message_may_say_that_it_is_not_trained(tokenizer):
    chat = [*CHAT[:2], CHAT[2] | {"weight": 0}, *CHAT[3:]]
    assert trained_text(tokenizer, tokens_of(tokenizer, *chat)) == "me<|im_end|>"
    chat = [*CHAT[:4], CHAT[4] | {"train": False}]
    assert trained_text(tokenizer, tokens_of(tokenizer, *chat)) == "yo<|im_end|>"
    assert not any(tokens_of(tokenizer, *CHAT, weight=0).trained)


def test_what_contradicts_what_is_trained_is_refused(tokenizer):
    with pytest.raises(TaskError, match="trains everything"):
        tokens_of(tokenizer, *CHAT, weight=0, loss_on="all")
    with pytest.raises(TaskError, match="message 2 asks to be trained on, and its role is user"):
        tokens_of(tokenizer, CHAT[0], CHAT[1] | {"train": True}, CHAT[2])


def test_rows_of_every_form_are_one_conversation(tokenizer):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    user, said = {"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "B"}
    rows = [
        {"messages": [SHORT, user, said]},
        {"prompt": "a\nb", "completion": "B", "system": "S", "id": 7, "metadata": {"x": 1}},
        {"prompt": [SHORT, user], "completion": [said]},
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "human", "value": "a\nb"},
                {"from": "gpt", "value": "B"},
            ]
        },
        {"instruction": "a", "input": "b", "output": "B", "system": "S", "history": []},
    ]
    assert len({str(tokenise("f:1", row, tokenizer)) for row in rows}) == 1
    sharegpt = {"from": "function_call", "value": '{"name": "add", "arguments": "{\\"a\\": 1}"}'}
    row = conversation_of("f:1", {"conversations": [{"from": "human", "value": "1+1"}, sharegpt], "tools": "[]"})
    assert row.messages[1] == {"role": "assistant", "tool_calls": calls}


SHORT = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": "more"}, "has a field input, which has no meaning beside messages"),
        ({"images": ["a.png"]}, "has a field images, which has no meaning"),
        ({"tools": [{"name": "add"}]}, "the chat template leaves out the tool add"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs may not hold tools"),
        ({"chat_template_kwargs": {"x": 1}}, "the chat template does not read x, which chat_template_kwargs has"),
        ({"weight": 0.5}, "the row's weight is 0.5; it must be 0 or 1"),
        ({"system": "S"}, "has system beside a system message"),
        ({"text": "once"}, "has a field text"),
    ],
)
def test_a_field_has_a_meaning_or_is_refused(tokenizer, fields, says):
    with pytest.raises(TaskError, match=rf"^rows.jsonl:1: {re.escape(says)}"):
        tokens_of(tokenizer, *CHAT, **fields)


@pytest.mark.parametrize(
    "others",
    [
        {"prompt": "hi", "prompt_id": "a1"},  # ultrachat_200k, no_robots
        {"problem": "hi", "solution": "yo"},  # NuminaMath-CoT
        {"instruction": "and", "response": "me", "model_name": None},  # Magpie
        {"chat_template_kwargs": {"custom_instructions": None}},  # smoltalk2: a column that other rows fill
    ],
)
def test_a_field_that_says_what_a_message_says_is_taken(tokenizer, others):
    assert tokens_of(tokenizer, *CHAT, **others) == tokens_of(tokenizer, *CHAT)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q", "answer": "4"}, "rename question to prompt and answer to completion"),  # gsm8k
        ({"conversation": [*CHAT], "toxic": False}, "rename conversation to messages"),  # WildChat
        ({"instruction": "i", "context": "c", "response": "r"}, "has an instruction and no output; rename response to"),
        ({"messages": [*CHAT], "a": 1, "b": 2}, "has fields a, b, which have no meaning beside messages; remove them"),
        ({"messages": [*CHAT], "prompt": "another"}, "has both messages and prompt"),
        ({"prompt": "p", "completion": "c", "system_prompt": "s"}, "rename system_prompt to system"),  # OpenOrca
    ],
)
def test_a_row_of_another_data_set_is_told_what_to_change(tokenizer, row, says):
    with pytest.raises(TaskError, match=re.escape(says)):
        tokenise("f:1", row, tokenizer)


def test_nulls_that_fill_other_tools_columns_are_dropped(folder):
    """As a data set is read back from Arrow: each tool has the other's parameters, each call its arguments, as null."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    template = "{{ tools | tojson }}" + template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    tokenizer = Tokenizer.from_folder(folder)

    def row(**padding):
        tool = {"name": "rain", "parameters": {"properties": {"city": {"type": "string", "default": None}} | padding}}
        call = {"name": "rain", "arguments": {"city": "Rome"} | padding}
        said = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
        return tokens_of(tokenizer, CHAT[1], said, tools=[{"type": "function", "function": tool}])

    assert row(expr=None) == row()


def test_rows_that_are_read_otherwise_than_they_look_are_told(tmp_path, folder):
    """Words that spell a token which ends a turn; a token with a part of the prompt and a part of the completion."""
    backend = json.loads((folder / "tokenizer.json").read_text())
    backend["model"]["vocab"]["\nyo"] = len(backend["model"]["vocab"])
    backend["model"]["vocab"]["yo"] = len(backend["model"]["vocab"])
    backend["model"]["merges"] = [["y", "o"], ["\n", "yo"]]
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 110}))
    file = tmp_path / "odd.jsonl"
    file.write_text('{"prompt": "hi", "completion": "yo"}\n{"prompt": "a<|im_end|>b", "completion": "me"}\n')
    data = {"type": "sft", "path": str(file), "batch_size": 1, "seq_len": 64}
    said = prepare_sft(config(tmp_path, folder, data=data)).data.sentence
    assert "1 have a token that is partly of the generation prompt and partly of the completion" in said
    assert f"begins or ends a turn there: <|im_end|> in {file}:2 is the first." in said


def test_plain_text_is_trained_whole(tokenizer):
    tokens = tokenise("f:1", {"text": "once"}, tokenizer, "all")
    assert trained_text(tokenizer, tokens) == "nce<|im_end|>"
    with pytest.raises(TaskError, match=r"set data\.loss_on"):
        tokenise("f:1", {"text": "once"}, tokenizer)


def test_a_prompt_that_opens_what_a_row_does_not_is_told(tmp_path, folder):
    """DeepSeek-R1's: the generation prompt opens thoughts, and a row without thoughts has none."""
    file = tmp_path / "thoughts.jsonl"
    file.write_text("".join(f'{{"prompt": "hi", "completion": "{said}"}}\n' for said in ("yo", "<think></think>yo")))
    data = {"type": "sft", "path": str(file), "batch_size": 1, "seq_len": 64}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings["chat_template"].replace("assistant\\n", "assistant\\n<think>")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    about = prepare_sft(config(tmp_path, folder, data=data)).data
    assert "1 do not begin their last turn as the chat template's generation prompt does" in about.sentence
    assert about.first.endswith("assistant\n[[yo<|im_end|>]]\n")


def test_without_a_template_every_turn_begins_alike(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    base = Tokenizer.from_folder(folder)
    tokens = tokens_of(base, *CHAT)
    assert base.decode(tokens.ids, skip_special_tokens=False) == "Short.\nhiyo<|im_end|>\nandme<|im_end|>"
    assert trained_text(base, tokens) == "yo<|im_end|>me<|im_end|>"


def rows(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_cut_and_skipped_samples_are_counted(tmp_path, tokenizer):
    file = rows(
        tmp_path,
        {"prompt": "hi", "completion": "yo"},
        {"prompt": "hi", "completion": "y" * 100},
        {"prompt": "h" * 100, "completion": "yo"},
        {"messages": CHAT[1:3]},
    )
    read = read_conversations(str(file), tokenizer, 40, "assistant")
    assert (len(read.samples), read.counts.cut, read.counts.skipped) == (3, 2, 1)
    assert [len(sample) for sample in read.samples][1] == 40
    assert read.samples[0].token_ids == read.samples[2].token_ids, "prompt/completion is a chat of two messages"


def test_samples_are_cut_to_the_positions_that_the_model_has(tmp_path, folder):
    data = {"type": "sft", "path": str(tmp_path / "rows.jsonl"), "batch_size": 1, "seq_len": 1024}
    given = config(tmp_path, folder, data=data)
    rows(tmp_path, {"prompt": "hi", "completion": "y" * 100})
    assert len(prepare_sft(given).batch(0)[0]) > 100
    (folder / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 102, "max_position_embeddings": 64}))
    prepared = prepare_sft(given)
    assert len(prepared.batch(0)[0]) == 64
    assert "1 were cut to 64 tokens (the model's max_position_embeddings)" in prepared.data.sentence


def test_no_completion_within_seq_len_is_an_error(tmp_path, tokenizer):
    file = rows(tmp_path, {"prompt": "h" * 100, "completion": "yo"})
    with pytest.raises(TaskError, match=r"no completion begins within 40 tokens, the least of data.seq_len and"):
        read_conversations(str(file), tokenizer, 40, "assistant")


def test_fake_samples():
    fixed = fake_samples(3, 8, 5, step=0)
    assert [sample.token_ids for sample in fixed] == [(0, 1, 2, 3, 4, 0, 1, 2)] * 3
    variable = fake_samples(50, 8, 5, step=0, variable=True, random_ids=True, for_rl=True)
    assert {len(sample) for sample in variable} == set(range(2, 9))
    assert all(token < 5 for sample in variable for token in sample.token_ids)
    assert all(sample.advantages and sample.rollout_logprobs and not sample.loss_mask[0] for sample in variable)
    assert variable == fake_samples(50, 8, 5, step=0, variable=True, random_ids=True, for_rl=True)
    assert variable != fake_samples(50, 8, 5, step=1, variable=True, random_ids=True, for_rl=True)


class Memory:
    """A trainer that remembers what it saw. Its state is the number of optimizer steps."""

    num_ranks, micro_batches_per_rank = 2, 1

    def __init__(self):
        self.seen, self.loss_denominators, self.step, self.slots = [[]], [], 0, [0]

    async def forward_backward(self, samples, seq_len):
        self.seen[-1] += [sample.token_ids for sample in samples]

    async def optim_step(self, loss_denominator):
        self.step += 1
        self.loss_denominators.append(loss_denominator)
        self.seen.append([])
        self.slots = [0, 1]  # it has grown
        return StepReport(self.step, 1 / self.step, 0.1, 1e-3, int(loss_denominator), {"skipped": 0.0})

    async def save(self, path):
        write(path, str(self.step))

    async def load(self, path):
        self.step = int(read(path))

    async def export(self, path, dtype):
        pass


def config(tmp_path, folder, **keys):
    file = rows(tmp_path, *({"prompt": f"{i}", "completion": f"{i}!"} for i in range(10)))
    data = {"type": "sft", "path": str(file), "batch_size": 4, "seq_len": 64}
    return SFTConfig.model_validate(
        {"model": {"name": str(folder), "seq_len": 64}, "data": data, "output_dir": str(tmp_path / "run"), **keys}
    )


def train(prepared, tmp_path, stop_after=None):
    async def go():
        record, trainer, stop = Recorder(tmp_path / "run"), Memory(), asyncio.Event()
        if stop_after is not None:
            optim_step = trainer.optim_step

            async def then_stop(loss_denominator):
                if trainer.step + 1 == stop_after:
                    stop.set()
                return await optim_step(loss_denominator)

            trainer.optim_step = then_stop
        summary = await run_batches(prepared, trainer, RunContext(record, stop, lambda: {"train": trainer.slots}))
        record.close()
        return trainer, summary

    return asyncio.run(go())


def test_one_pass_over_the_data_by_default(tmp_path, folder):
    prepared = prepare_sft(config(tmp_path, folder))
    assert "10 samples: 2 of the last step are of a second pass." in prepared.data.sentence
    assert "second pass" not in prepare_sft(config(tmp_path, folder, max_steps=3)).data.sentence
    trainer, summary = train(prepared, tmp_path)
    assert summary["steps"] == 3
    assert (summary["samples"], summary["samples_cut"], summary["slots"]) == (10, 0, {"train": [0, 1]})
    assert [len(batch) for batch in trainer.seen[:3]] == [4, 4, 4]
    assert len(Counter(sample for batch in trainer.seen for sample in batch)) == 10
    assert trainer.loss_denominators == [4 * 3.0] * 3  # digit, "!", end of turn
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert {"loss", "grad_norm", "lr", "tokens", "tokens_per_s_train", "step_s"} <= metrics[0].keys()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["loss_last"] == pytest.approx(1 / 3)


def test_stop_and_resume_see_the_same_batches(tmp_path, folder):
    whole, _ = train(prepare_sft(config(tmp_path, folder, max_steps=8, output_dir=str(tmp_path / "w"))), tmp_path / "w")
    first, summary = train(prepare_sft(config(tmp_path, folder, max_steps=8)), tmp_path, stop_after=3)
    assert summary["steps"] == 3
    resumed = prepare_sft(config(tmp_path, folder, max_steps=8, ckpt={"resume_step": -1}))
    assert resumed.progress.step == 3
    second, summary = train(resumed, tmp_path)
    assert summary["steps"] == 8
    assert first.seen[:3] + second.seen == whole.seen
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 9))


def test_the_date_that_a_template_writes_is_told_and_again_on_another_day(tmp_path, folder, monkeypatch):
    assert "today" not in prepare_sft(config(tmp_path, folder)).data.sentence
    set_day = writes_date(folder, monkeypatch)
    set_day(27)
    prepared = prepare_sft(config(tmp_path, folder, max_steps=8))
    assert "The chat template writes today's date ('27 Nov 2026'): prompts of another day" in prepared.data.sentence
    train(prepared, tmp_path, stop_after=3)
    resumed = config(tmp_path, folder, max_steps=8, ckpt={"resume_step": -1})
    assert not prepare_sft(resumed).began.changes
    set_day(28)
    (change,) = prepare_sft(resumed).began.changes
    assert (change.before, change.now) == (["27 Nov 2026"], ["28 Nov 2026"])
    assert "27 Nov 2026" in change.sentence
    assert "28 Nov 2026" in change.sentence


def test_resume_from_a_step_that_is_not_there(tmp_path, folder):
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 5"):
        prepare_sft(config(tmp_path, folder, ckpt={"resume_step": 5}))


def test_bench_makes_up_data_and_saves_nothing(tmp_path, folder):
    prepared = prepare_sft(config(tmp_path, folder, bench={}))
    trainer, summary = train(prepared, tmp_path)
    assert summary["steps"] == 5, "four, and one that is traced"
    assert not (tmp_path / "run" / "state").exists()
    assert trainer.seen[0][0] == tuple(range(64))


def test_the_trainer_alone(tmp_path, folder):
    config = TrainerRunConfig.model_validate(
        {
            "model": {"name": str(folder), "seq_len": 32},
            "data": {"fake": {"batch_size": 3, "generate_samples": True}},
            "max_steps": 2,
            "loss": {"type": "grpo", "aggregation": "seq_mean_token_mean"},
        }
    )
    prepared = prepare_fake(config)
    assert prepared.trainer.loss == config.loss
    assert prepared.trainer.max_steps == 2
    trainer, summary = train(prepared, tmp_path)
    assert summary["steps"] == 2
    assert trainer.loss_denominators == [3.0, 3.0]
    assert all(sample.weights for sample in prepared.batch(0))


def test_steps_that_are_thrown_away_end_the_run_saved(tmp_path, folder):
    class Diverging(Memory):
        async def optim_step(self, loss_denominator):
            report = await super().optim_step(loss_denominator)
            return replace(report, metrics={"skipped": float(self.step > 2)})

    prepared = prepare_sft(config(tmp_path, folder, max_steps=9, optim={"type": "adamw", "max_skipped_steps": 2}))
    record = Recorder(tmp_path / "run")
    with pytest.raises(
        Diverged, match=r"the last 2 optimizer steps were not finite \(optim\.max_skipped_steps\).* lower optim\.lr"
    ):
        asyncio.run(run_batches(prepared, Diverging(), RunContext(record, asyncio.Event())))
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "state" / "step_4").is_dir()


def test_a_resume_with_no_step_to_do_writes_the_model_that_failed(tmp_path, folder):
    class NoRoom(Memory):
        async def export(self, path, dtype):
            raise OSError(28, "No space left on device")

    class Exporting(Memory):
        async def export(self, path, dtype):
            write(path, str(self.step))

    def go(trainer, **keys):
        record = Recorder(tmp_path / "run")
        prepared = prepare_sft(config(tmp_path, folder, max_steps=2, **keys))
        summary = asyncio.run(run_batches(prepared, trainer, RunContext(record, asyncio.Event())))
        record.close()
        return summary

    with pytest.raises(ExportFailed):
        go(NoRoom())
    kinds = [row["kind"] for row in read_jsonl(tmp_path / "run" / "events.jsonl")]
    assert kinds[-2:] == ["saved", "not_exported"]
    assert go(Exporting(), ckpt={"resume_step": -1})["steps"] == 2
    assert read(str(tmp_path / "run" / "model")) == "2"
