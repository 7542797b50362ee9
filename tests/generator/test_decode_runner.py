"""Decode steps that are recorded and replayed: they say what eager ones do, whatever comes between them.

On a CPU the recorder is `tests.generator.tape.Tape`, which replays operators on memory as a CUDA graph does; with CUDA
graphs themselves `tests/test_gpu.py` asks the same.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ductile.core.layout.model.lora import LoraSpec
from ductile.core.layout.model.parameters import is_adapter
from ductile.generator.engine import decode_runner
from ductile.generator.engine.decode_runner import StepShape, padded_blocks, padded_rows
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.logprob_report import LogprobReport
from ductile.generator.engine.step_profiler import StepProfiler
from ductile.kernels import varlen_attention
from ductile.model.checkpoint import load_model
from ductile.records import GenerateRequest, Generation
from tests.generator.conftest import FAMILIES, Family, request, run
from tests.generator.tape import Tape
from tests.tiny import make_model_folder

PROMPTS = ["hello", "a", "what is 1 + 2? " * 5, "The quick brown fox jumps over the lazy dog.", "x" * 33]


def asked(**sampling: Any) -> list[GenerateRequest]:
    """Requests that end one after the other; two of them grow past the first width of the table."""
    return [
        request(str(place), prompt, max_tokens, **sampling)
        for place, (prompt, max_tokens) in enumerate(zip(PROMPTS, (8, 16, 70, 110, 40), strict=True))
    ]


def check_same(found: dict[str, Generation], expected: dict[str, Generation]) -> None:
    assert {id: done.token_ids for id, done in found.items()} == {id: done.token_ids for id, done in expected.items()}
    for id, done in expected.items():
        assert found[id].logprobs == pytest.approx(done.logprobs, abs=1e-4)
        assert found[id].versions == done.versions


def test_rows_are_padded_by_at_most_an_eighth_beyond_eight() -> None:
    for num in range(1, 700):
        padded = padded_rows(num)
        assert padded == padded_rows(padded) >= num
        assert padded - num <= max(7, num / 8)


def test_a_batch_that_runs_dry_comes_through_few_shapes() -> None:
    assert [padded_rows(num) for num in (1, 2, 3, 5, 9, 17, 100, 129, 600)] == [1, 2, 4, 8, 16, 24, 104, 144, 640]
    assert len({padded_rows(num) for num in range(1, 65)}) == 11
    assert len({padded_rows(num) for num in range(1, 513)}) == 35


@pytest.mark.parametrize(
    ("longest", "most", "block_size", "blocks"),
    [
        (1, 2048, 16, 8),
        (128, 2048, 16, 8),
        (129, 2048, 16, 16),
        (1025, 2048, 256, 8),
        (1025, 1500, 256, 6),
        (100, 100, 7, 15),
        (5, 2048, 256, 1),
    ],
)
def test_a_table_has_room_for_a_power_of_two(longest: int, most: int, block_size: int, blocks: int) -> None:
    assert padded_blocks(longest, most, block_size) == blocks
    assert blocks * block_size >= longest


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_recorded_steps_say_what_eager_ones_do(
    families: dict[str, Family], name: str, sampling: dict[str, Any]
) -> None:
    tape = Tape()
    engine = families[name].engine(recorder=tape, block_size=7)
    check_same(run(engine, asked(**sampling)), run(families[name].engine(block_size=7), asked(**sampling)))
    runner = engine._decode_runner
    assert runner is not None
    assert runner.num_replayed > 100
    # One by one five requests become one; the longest sequence passes 128 tokens while there are two of them.
    assert runner.num_recorded == len(tape.recordings) <= 6


@pytest.mark.parametrize(
    "pressure",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 2, "max_num_batched_tokens": 16},
        {"block_size": 1},
        {"block_size": 256},
        {"num_blocks": 18},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_they_do_under_pressure(qwen3: Family, pressure: dict[str, Any]) -> None:
    engine = qwen3.engine(recorder=Tape(), **pressure)
    check_same(run(engine, asked()), run(qwen3.engine(enable_prefix_caching=False), asked()))
    assert engine._decode_runner is not None
    assert engine._decode_runner.num_replayed


def other_weights(tmp_path: Path, seed: int) -> dict[str, Tensor]:
    return dict(load_model(make_model_folder(tmp_path / f"seed {seed}", seed=seed)).named_parameters())


def by_columns(tensors: dict[str, Tensor], engine: Engine) -> dict[str, Tensor]:
    """As a staged version has them: in memory of their own, laid as the engine's."""
    return {name: torch.empty_like(like).copy_(tensors[name]) for name, like in engine.weights()}


@pytest.mark.parametrize("keep_cache", [False, True])
def test_new_values_in_the_same_memory_are_read_by_what_was_recorded(
    qwen3: Family, tmp_path: Path, keep_cache: bool
) -> None:
    news, done, tape = other_weights(tmp_path, 1), list[dict[str, Generation]](), Tape()
    for recorder in (tape, None):
        engine = qwen3.engine(recorder=recorder, keep_cache_on_update=keep_cache)

        def update(step: int, engine: Engine = engine) -> None:
            if step == 30:
                engine.load_weights(news, version=1)

        done.append(run(engine, asked(), update))
    check_same(*done)
    assert {1} <= {version for generation in done[0].values() for version in generation.versions}
    shapes = engine_shapes(qwen3, keep_cache)
    assert len(tape.recordings) == shapes, "nothing was recorded again"


def engine_shapes(family: Family, keep_cache: bool) -> int:
    """Recordings of the same requests without an update."""
    tape = Tape()
    run(family.engine(recorder=tape, keep_cache_on_update=keep_cache), asked())
    return len(tape.recordings)


def test_weights_that_come_to_lie_elsewhere_are_recorded_anew_once_for_each_place(
    qwen3: Family, tmp_path: Path
) -> None:
    """Versions take turns in two places, as `LiveWeights` has them."""
    versions, done, tape = (
        [other_weights(tmp_path, seed) for seed in (1, 2, 3, 4)],
        list[dict[str, Generation]](),
        Tape(),
    )
    counts: list[int] = []
    for recorder in (tape, None):
        engine = qwen3.engine(recorder=recorder)
        places = [dict(engine.weights())]
        places = [{name: each.data for name, each in places[0].items()}, by_columns(versions[0], engine)]

        def update(step: int, engine: Engine = engine, places: list[dict[str, Tensor]] = places) -> None:
            if step and step % 12 == 0 and step <= 48:
                version = step // 12
                room = places[version % 2]
                for name, tensor in versions[version - 1].items():
                    room[name].copy_(tensor)
                engine.swap_weights(room, version)
            if step < 60:
                counts.append(len(tape.recordings))

        done.append(run(engine, [request(str(place), "hello", 60) for place in range(3)], update))
    check_same(*done)
    assert {version for generation in done[0].values() for version in generation.versions} == {0, 1, 2, 3, 4}
    assert len(tape.recordings) == 2, "one shape in two places"


def test_adapters_that_are_published_are_read(qwen3: Family) -> None:
    def engine(recorder: Tape | None) -> Engine:
        config, decode = qwen3.engine().config, qwen3.tokenizer.decode
        model = load_model(qwen3.folder, lora=LoraSpec(4, 8.0, ("q_proj", "up_proj")))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_adapter(name):
                    parameter.zero_()
        return Engine(model, config, (), decode, recorder=recorder)

    generator = torch.Generator().manual_seed(0)
    with_recorder, without = engine(Tape()), engine(None)
    news = {name: torch.randn(each.shape, generator=generator) for name, each in without.weights() if is_adapter(name)}
    done: list[dict[str, Generation]] = []
    for one in (with_recorder, without):
        run(one, asked())
        one.load_weights(news, version=1)
        done.append(run(one, asked()))
    check_same(*done)
    base = run(qwen3.engine(), asked())
    assert base["2"].token_ids != done[0]["2"].token_ids


@pytest.mark.parametrize("fails_at", [0, 2])
def test_what_cannot_be_recorded_runs_kernel_by_kernel_and_says_why_once(
    qwen3: Family, capfd: pytest.CaptureFixture[str], fails_at: int
) -> None:
    engine = qwen3.engine(recorder=Tape(fails_at))
    check_same(run(engine, asked()), run(qwen3.engine(), asked()))
    said = capfd.readouterr().err
    assert said == (
        "decode steps run without CUDA graphs, kernel by kernel, as one could not be captured: "
        "operation not permitted when stream is capturing\n"
    )
    run(engine, asked())
    assert capfd.readouterr().err == ""


def test_a_recording_reads_no_value_on_the_host() -> None:
    """The tape's own rule, which is CUDA's."""
    number = torch.ones(())
    for work in (number.item, lambda: torch.tensor([1.0])):
        with pytest.raises(RuntimeError, match="is not permitted while a step is recorded"):
            Tape().record(work)


def test_a_replay_knows_nothing_of_what_changed_in_python() -> None:
    number, out, place = torch.ones(3), torch.zeros(3), [1.0]
    recording = Tape().record(lambda: out.copy_(number * place[0]))
    number.fill_(2.0)
    place[0] = 5.0
    recording.replay()
    assert out.tolist() == [2.0] * 3
    number.data = torch.full((3,), 7.0)
    recording.replay()
    assert out.tolist() == [2.0] * 3, "memory is what is recorded"


def test_a_client_that_wants_log_probs_of_its_prompt_gets_them(qwen3: Family) -> None:
    reports: list[LogprobReport] = []
    for recorder in (Tape(), None):
        engine = qwen3.engine(recorder=recorder, max_num_batched_tokens=16)
        reports.append(LogprobReport(2, with_prompt=True))
        engine.add(request("first", "x" * 15, 20))
        engine.add(request("asks", "what is it?" * 3, 20), report=reports[-1])
        while engine.has_work():
            engine.step()
    ours, expected = reports
    assert len(ours.prompt) == len(expected.prompt) == 32
    for (logprob, _), (other, _) in zip(ours.prompt, expected.prompt, strict=True):
        assert logprob == pytest.approx(other, abs=1e-4)
    assert [[token for token, _ in place] for place in ours.completion] == [
        [token for token, _ in place] for place in expected.completion
    ]


def test_what_would_copy_too_much_is_not_recorded(qwen3: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_runner, "MOST_GATHERED_TOKENS", 2 * 128)
    tape = Tape()
    engine = qwen3.engine(recorder=tape)
    check_same(run(engine, asked()), run(qwen3.engine(), asked()))
    runner = engine._decode_runner
    assert runner is not None
    assert runner.num_replayed
    assert {*runner._recordings} <= {StepShape(1, 8), StepShape(2, 8), StepShape(1, 16)}


def test_the_first_step_of_a_shape_is_not_measured(qwen3: Family) -> None:
    engine, profiler = qwen3.engine(recorder=Tape()), StepProfiler()
    engine.add(request("r", "hello", 6))
    kinds: list[bool] = []
    while engine.has_work():
        engine.step()
        assert engine.last_step is not None
        profiler.record(engine.last_step, 1.0)
        kinds.append(engine.last_step.is_recorded)
    assert kinds == [False, True, False, False, False, False]
    decoded, _ = profiler.drain()
    assert decoded == ((1.0, 8.5, 1.0),), "steps of contexts of 7 to 10 tokens"


# -- The kernel that reads the cache where it lies


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` over pages, of one query a sequence, as its page describes it."""
    assert options.pop("enable_gqa")
    assert options.pop("num_splits") == 1
    lengths, table = options.pop("seqused_k"), options.pop("block_table")
    assert not options
    num, heads, size = query.shape
    assert (max_q, max_k) == (1, table.shape[1] * key.shape[1])
    assert {each.dtype for each in (cu_seq_q, cu_seq_k, lengths, table)} == {torch.int32}
    assert cu_seq_q.shape == cu_seq_k.shape == (num + 1,)
    keys, values = (
        pages[table.long()].flatten(1, 2).repeat_interleave(heads // key.shape[2], dim=2) for pages in (key, value)
    )
    scores = torch.einsum("nhd,nshd->nhs", query, keys) / math.sqrt(size)
    hidden = torch.arange(max_k) >= lengths[:, None]
    weights = scores.masked_fill(hidden[:, None, :], -torch.inf).softmax(-1)
    return torch.einsum("nhs,nshd->nhd", weights, values)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_that_the_kernel_reads_in_place_gives_the_same(
    families: dict[str, Family], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
    monkeypatch.setattr(varlen_attention, "why_not_paged", lambda *heads: "")
    monkeypatch.setattr(decode_runner, "MOST_GATHERED_TOKENS", 0)
    engine = families[name].engine(recorder=Tape(), block_size=16)
    check_same(run(engine, asked()), run(families[name].engine(), asked()))
    runner = engine._decode_runner
    assert runner is not None
    assert (runner.why_gathered, runner.num_replayed > 100) == ("", True)


@pytest.mark.parametrize(
    ("heads", "block_size", "has_pages", "why"),
    [
        ((torch.bfloat16, 128, (9, 0)), 256, True, ""),
        ((torch.bfloat16, 128, (9, 0)), 512, True, ""),
        ((torch.bfloat16, 128, (9, 0)), 16, True, "reads blocks of 256 tokens, or a multiple, and these have 16"),
        ((torch.bfloat16, 128, (9, 0)), 256, False, "reads no blocks"),
        ((torch.float32, 128, (9, 0)), 256, True, "not in float32"),
        ((torch.bfloat16, 128, None), 256, True, "for NVIDIA devices"),
    ],
)  # fmt: skip
def test_why_the_kernel_cannot_is_said(
    heads: tuple[torch.dtype, int, tuple[int, int] | None],
    block_size: int,
    has_pages: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has: Callable[[], bool] = lambda: has_pages  # noqa: E731
    monkeypatch.setattr(varlen_attention, "torch_has_pages", has)
    found = varlen_attention.why_not_paged(*heads, block_size)
    assert why in found
    assert bool(found) == bool(why)
