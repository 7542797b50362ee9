"""What the engine promises, against `transformers` and against itself under other circumstances."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ductile.config.schema.inference import InferenceConfig, InferenceModelConfig
from ductile.core.layout.model.spec import ModelSpec
from ductile.generator.engine import engine as engine_module
from ductile.generator.engine.engine import Engine, num_cache_blocks
from ductile.generator.engine.limits import RequestRefused
from ductile.generator.engine.sampler import all_logprobs
from ductile.generator.generate_role import load_engine
from ductile.generator.server.choice import Choice
from ductile.generator.server.runner import Delta
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from ductile.records import GenerateRequest, Generation, Sampling
from tests.generator.conftest import FAMILIES, Family, request, run
from tests.tiny import IM_END, IM_START, PAD

PROMPTS = ["hello", "a", "what is 1 + 2? " * 5, "The quick brown fox jumps over the lazy dog.", "x" * 33]


def requests(max_tokens: int = 24, **sampling: Any) -> list[GenerateRequest]:
    return [request(str(i), prompt, max_tokens, **sampling) for i, prompt in enumerate(PROMPTS)]


def tokens(done: dict[str, Generation]) -> dict[str, tuple[int, ...]]:
    return {id: generation.token_ids for id, generation in done.items()}


def packed_logprobs(folder: Path, pairs: list[tuple[GenerateRequest, Generation]]) -> list[list[float]]:
    """What the trainer's forward pass says of the generated tokens: all sequences packed into one."""
    model = load_model(folder)
    sequences = [[*one.prompt, *generation.token_ids] for one, generation in pairs]
    lengths = [len(sequence) for sequence in sequences]
    with torch.no_grad():
        logits = model(
            torch.tensor([token for sequence in sequences for token in sequence]),
            torch.cat([torch.arange(n) for n in lengths]),
            PackedAttention(lengths),
        )
    found: list[list[float]] = []
    for (one, _), sequence, part in zip(pairs, sequences, logits.split(lengths), strict=True):
        logprobs = (part / (one.sampling.temperature or 1.0)).log_softmax(-1)
        first = len(one.prompt)
        found.append([logprobs[i - 1, sequence[i]].item() for i in range(first, len(sequence))])
    return found


@pytest.mark.parametrize("fp32_lm_head", [False, True])
def test_a_head_in_fp32_rounds_no_logit_to_16_bits(
    qwen3: Family, fp32_lm_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        engine_module, "all_logprobs", lambda logits, of: seen.append(logits) or all_logprobs(logits, of)
    )
    model = InferenceModelConfig(name=str(qwen3.folder), max_model_len=64, dtype="bfloat16", fp32_lm_head=fp32_lm_head)
    run(load_engine(InferenceConfig(model=model), "cpu"), [request("0", "hello", 4)])
    rounded = [logits.bfloat16().to(logits.dtype).equal(logits) for logits in seen]
    assert rounded == [not fp32_lm_head] * 4


@pytest.fixture(scope="module")
def greedy(qwen3: Family) -> dict[str, tuple[int, ...]]:
    """The completions of an engine without any pressure; the tests below put pressure on and expect the same."""
    return tokens(run(qwen3.engine(enable_prefix_caching=False), requests()))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(families: dict[str, Family], name: str) -> None:
    import transformers

    family = families[name]
    peer = transformers.AutoModelForCausalLM.from_pretrained(family.folder)
    done = run(family.engine(), requests(24))
    for one in requests(24):
        ids = torch.tensor([one.prompt])
        expected = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(done[one.id].token_ids) == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "sampling",
    [
        *({"temperature": temperature} for temperature in (0.0, 0.7, 1.0, 1.5)),
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
    ],
    ids=str,
)
def test_logprobs_equal_those_of_the_packed_training_forward(
    families: dict[str, Family], name: str, sampling: dict[str, float]
) -> None:
    """Also where tokens were cut off: the trainer, on the same weights, must find an importance ratio of 1."""
    asked = requests(32, **sampling)
    done = run(families[name].engine(max_num_batched_tokens=48), asked)
    expected = packed_logprobs(families[name].folder, [(one, done[one.id]) for one in asked])
    for one, logprobs in zip(asked, expected, strict=True):
        assert done[one.id].logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "pressure",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 16},
        {"block_size": 1},
        {"block_size": 7, "max_num_batched_tokens": 17},
        {"enable_prefix_caching": True},
        {"num_blocks": 7},
    ],
    ids=str,
)
def test_greedy_tokens_do_not_depend_on_batching(
    qwen3: Family, greedy: dict[str, tuple[int, ...]], pressure: dict[str, Any]
) -> None:
    assert tokens(run(qwen3.engine(**pressure), requests())) == greedy


def test_too_few_blocks_preempt_and_change_nothing(qwen3: Family) -> None:
    asked = [request(str(i), f"prompt {i}", 40, temperature=1.0, seed=i) for i in range(6)]
    plenty, scarce = qwen3.engine(), qwen3.engine(block_size=4, num_blocks=16)
    expected = run(plenty, asked)
    found = run(scarce, asked)
    assert plenty.stats().num_preempted == 0
    assert scarce.stats().num_preempted > 0
    assert tokens(found) == tokens(expected)
    assert all(found[id].logprobs == pytest.approx(expected[id].logprobs, abs=1e-4) for id in expected)


def test_a_group_shares_its_prompt(qwen3: Family) -> None:
    prompt = "a prompt that is long enough to fill a few blocks of the cache"
    group = [request(str(i), prompt, 8, group="g", temperature=1.0, seed=i) for i in range(8)]
    peaks: dict[bool, int] = {}
    completions: dict[bool, dict[str, tuple[int, ...]]] = {}
    for sharing in (False, True):
        engine = qwen3.engine(enable_prefix_caching=sharing, block_size=8)
        used: list[int] = []

        def count(step: int, engine: Engine = engine, used: list[int] = used) -> None:
            used.append(engine.pool.num_blocks - engine.pool.num_free)

        completions[sharing] = tokens(run(engine, group, count))
        peaks[sharing] = max(used)
    assert completions[True] == completions[False]
    num_shared = (len(prompt) - 1) // 8
    assert peaks[True] == peaks[False] - 7 * num_shared


def test_members_that_start_together_compute_their_prompt_once(qwen3: Family) -> None:
    engine = qwen3.engine(block_size=8)
    for i in range(4):
        engine.add(request(str(i), "x" * 33, 2, group="g"))
    chunks = engine.scheduler.schedule()
    assert [(chunk.start, chunk.count) for chunk in chunks] == [(0, 33), (32, 1), (32, 1), (32, 1)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.3}], ids=str)
@pytest.mark.parametrize("after", [1, 2, 9])
def test_abort_and_resume_on_another_engine(qwen3: Family, sampling: dict[str, Any], after: int) -> None:
    whole = run(qwen3.engine(), requests(20, **sampling))
    first, second = qwen3.engine(), qwen3.engine(version=3)
    halves = run(first, requests(20, **sampling), lambda step: first.abort() if step == after else None)
    assert {half.finish_reason for half in halves.values()} == {"abort"}
    assert all(0 < len(half.token_ids) < 20 for half in halves.values())
    resumed = [
        GenerateRequest(
            one.id,
            one.prompt,
            one.sampling,
            generated=halves[one.id].token_ids,
            logprobs=halves[one.id].logprobs,
            versions=halves[one.id].versions,
        )
        for one in requests(20, **sampling)
    ]
    done = run(second, resumed)
    for id, generation in done.items():
        kept = len(halves[id].token_ids)
        assert generation.token_ids == whole[id].token_ids
        assert generation.logprobs[:kept] == halves[id].logprobs
        assert generation.logprobs == pytest.approx(whole[id].logprobs, abs=1e-4)
        assert generation.versions == (0,) * kept + (3,) * (20 - kept)
        assert generation.finish_reason == "length"


def test_a_completion_that_was_complete_when_handed_over_ends_at_once(qwen3: Family) -> None:
    engine = qwen3.engine()
    said = {"generated": (9, IM_END), "logprobs": (-1.0, -2.0), "versions": (4, 5)}
    one = request("done", "hi", 20, ignore_eos=False)
    engine.add(GenerateRequest(one.id, one.prompt, one.sampling, **said))
    assert engine.step() == [Generation("done", (9, IM_END), (-1.0, -2.0), (4, 5), "stop")]


def test_abort_of_some(qwen3: Family) -> None:
    engine = qwen3.engine(max_num_seqs=2)
    done = run(engine, requests(10), lambda step: engine.abort(["1", "4", "nobody"]) if step == 3 else None)
    assert {id: generation.finish_reason for id, generation in done.items()} == {
        "0": "length",
        "1": "abort",
        "2": "length",
        "3": "length",
        "4": "abort",  # it waited: it has nothing
    }
    assert done["4"].token_ids == ()


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("batched_tokens", [16, 1024])
def test_weights_change_in_flight(qwen3: Family, tmp_path: Path, keep_cache: bool, batched_tokens: int) -> None:
    from tests.tiny import make_model_folder

    other = make_model_folder(tmp_path / "other", "qwen3", seed=1)
    engine = qwen3.engine(keep_cache_on_update=keep_cache, max_num_batched_tokens=batched_tokens)
    news = dict(load_model(other).named_parameters())
    seen: dict[str, int] = {}

    def swap(step: int) -> None:
        if step == 8:
            for one in asked:
                generated = engine.peek(one.id)
                assert generated is not None
                seen[one.id] = len(generated[0])
            engine.load_weights(news, version=5)

    asked = requests(20, temperature=1.0, seed=3)
    done = run(engine, asked, swap)
    assert any(seen.values())
    old = packed_logprobs(qwen3.folder, [(one, done[one.id]) for one in asked])
    new = packed_logprobs(other, [(one, done[one.id]) for one in asked])
    for one, under_old, under_new in zip(asked, old, new, strict=True):
        generation, cut = done[one.id], seen[one.id]
        assert generation.versions == (0,) * cut + (5,) * (20 - cut)
        assert generation.logprobs[:cut] == pytest.approx(under_old[:cut], abs=1e-4)
        as_new = generation.logprobs[cut:] == pytest.approx(under_new[cut:], abs=1e-4)
        if cut:  # one that had not begun may have been in the middle of its prefill, or not
            assert as_new is not keep_cache
        assert as_new or keep_cache


def test_who_decodes_on_at_once_under_new_weights_reads_no_old_keys(qwen3: Family, tmp_path: Path) -> None:
    """The second's tokens begin the first's, so after the update it computes one token, as if nothing had happened."""
    from tests.tiny import make_model_folder

    other = make_model_folder(tmp_path / "other", "qwen3", seed=1)
    second = request("second", "a prompt", 20)
    completion = run(qwen3.engine(), [second])["second"].token_ids
    first = request("first", [*second.prompt, *completion, *range(5, 35)], 20)
    engine = qwen3.engine(block_size=1)
    news = dict(load_model(other).named_parameters())
    done = run(engine, [first, second], lambda step: engine.load_weights(news, version=1) if step == 8 else None)
    expected = packed_logprobs(other, [(second, done["second"])])[0]
    cut = done["second"].versions.index(1)
    assert done["second"].logprobs[cut:] == pytest.approx(expected[cut:], abs=1e-4)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_no_request_reads_blocks_of_older_weights(qwen3: Family, tmp_path: Path, keep_cache: bool) -> None:
    from tests.tiny import make_model_folder

    other = make_model_folder(tmp_path / "other", "qwen3", seed=1)
    engine = qwen3.engine(keep_cache_on_update=keep_cache, block_size=4)
    prompt = "a prompt of some blocks"
    run(engine, [request("before", prompt)])
    engine.add(request("during", prompt, 30))
    engine.step()
    engine.load_weights(dict(load_model(other).named_parameters()), version=1)
    while engine.has_work():
        engine.step()
    asked = request("after", prompt)
    done = run(engine, [asked])
    assert done["after"].logprobs == pytest.approx(packed_logprobs(other, [(asked, done["after"])])[0], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "norm.weight on one side only"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra on one side only"),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}), r"norm.weight of version 9 has shape \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    qwen3: Family, greedy: dict[str, tuple[int, ...]], change: Any, message: str
) -> None:
    engine = qwen3.engine()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in engine.model.named_parameters()}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        engine.load_weights(tensors, version=9)
    assert engine.version == 0
    assert tokens(run(engine, requests())) == greedy


def test_stop_token(qwen3: Family, greedy: dict[str, tuple[int, ...]]) -> None:
    stop = greedy["0"][5]
    first = greedy["0"].index(stop)
    done = run(qwen3.engine(), [request("0", PROMPTS[0], 24, stop_token_ids=(stop,))])
    assert done["0"].token_ids == greedy["0"][: first + 1]
    assert done["0"].finish_reason == "stop"


def test_end_of_sequence_stops_unless_ignored(qwen3: Family, greedy: dict[str, tuple[int, ...]]) -> None:
    eos = greedy["0"][3]
    engine = Engine(load_model(qwen3.folder), qwen3.engine().config, (eos,), qwen3.tokenizer.decode)
    heeding = request("heeding", PROMPTS[0], 24, ignore_eos=False)
    ignoring = request("ignoring", PROMPTS[0], 24)
    done = run(engine, [heeding, ignoring])
    assert done["heeding"].token_ids == greedy["0"][: greedy["0"].index(eos) + 1]
    assert done["heeding"].finish_reason == "stop"
    assert done["ignoring"].token_ids == greedy["0"]


@pytest.mark.parametrize("stop", ["<|im_start|>", "/<|im_start|>", "/<|im_start|>#", "/#"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_a_stop_string_may_have_special_tokens_and_the_server_agrees(
    qwen3: Family, stop: str, skip_special_tokens: bool
) -> None:
    said = qwen3.tokenizer.encode("/<|im_start|>#")
    sampling = Sampling(max_tokens=20, stop=(stop,), ignore_eos=True, skip_special_tokens=skip_special_tokens)
    one = GenerateRequest("r", (10,), sampling)
    engine = qwen3.engine()
    for last in range(1, len(said) + 1):
        part = tuple(said[:last])
        engine.add(replace(one, generated=part, logprobs=(-1.0,) * last, versions=(0,) * last))
        if not engine.num_generated():  # it has ended
            break
        engine.abort()
        engine.step()
    (ended,) = engine.step()
    assert (ended.finish_reason, len(ended.token_ids)) == ("stop", 3 if stop.endswith("#") else 2)
    choice = Choice(0, one, qwen3.tokenizer)
    choice.push(Delta(0, list(ended.token_ids), list(ended.logprobs), [], ended.finish_reason))
    whole = qwen3.tokenizer.decode(list(ended.token_ids), skip_special_tokens)
    assert choice.text == whole.partition(stop)[0]


def test_a_base_model_stops_at_the_end_of_turn_of_its_template(qwen3: Family, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen3.folder, tmp_path / "base")
    for name, settings in {
        "tokenizer_config.json": {"eos_token": "<|pad|>"},
        "config.json": {"eos_token_id": PAD},
    }.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": PAD}))
    engine = load_engine(InferenceConfig(model=InferenceModelConfig(name=str(folder), max_model_len=256)), "cpu")
    engine.add(GenerateRequest("r", (10,), Sampling(), generated=(20, IM_END), logprobs=(-1.0,) * 2, versions=(0,) * 2))
    assert [generation.finish_reason for generation in engine.step()] == ["stop"]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_stop_string_ends_with_the_token_that_completes_it(
    qwen3: Family, greedy: dict[str, tuple[int, ...]], length: int
) -> None:
    text = qwen3.tokenizer.decode(list(greedy["3"]))
    stop = text[6 : 6 + length]
    done = run(qwen3.engine(), [request("3", PROMPTS[3], 24, stop=("never said", stop))])
    said = qwen3.tokenizer.decode(list(done["3"].token_ids))
    assert said.endswith(stop)
    assert stop not in said[:-1]
    assert done["3"].finish_reason == "stop"


def test_completions_end_at_max_model_len(qwen3: Family) -> None:
    done = run(qwen3.engine(max_model_len=20), [request("0", "x" * 15, 100)])
    assert len(done["0"].token_ids) == 5
    assert done["0"].finish_reason == "length"


def test_higher_priority_goes_first(qwen3: Family) -> None:
    engine = qwen3.engine(max_num_seqs=1)
    plain = [request(str(i), "hi", 2) for i in range(3)]
    urgent = GenerateRequest("urgent", (9,), plain[0].sampling, priority=1)
    assert next(iter(run(engine, [*plain, urgent]))) == "urgent"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", []), "the prompt has no tokens"),
        (request("r", [5, 1000]), "token id 1000 is not in the vocabulary; ids go from 0 to 101"),
        (request("r", [-1]), "token id -1 is not in the vocabulary"),
        (request("r", "x" * 256), "the prompt has 256 tokens; model.max_model_len 256 leaves room for 255"),
        (request("r", "x" * 40, 100), "may reach 140 tokens and the whole cache holds 128"),
        (request("r", "x", temperature=-1.0), "temperature is -1.0; it must be 0 or at least 1e-05"),
        (request("r", "x", temperature=1e-40), "temperature is 1e-40; it must be 0 or at least 1e-05"),
        (request("r", "x", temperature=float("nan")), "temperature is nan"),
        (request("r", "x", top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
        (request("r", "x", top_k=0), r"top_k is 0; it must be -1 \(all\) or 1 or more"),
        (request("r", "x", min_p=1.5), "min_p is 1.5; it must be from 0 to 1"),
        (request("r", "x", 0), "max_tokens is 0; it must be 1 or more"),
        (request("r", "x", stop=("",)), "stop is .* strings of at least one character"),
        (request("busy", "x"), "a request of this id is in flight already"),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(qwen3: Family, bad: GenerateRequest, message: str) -> None:
    engine = qwen3.engine(num_blocks=8)
    engine.add(request("busy", "x"))
    with pytest.raises(RequestRefused, match=message):
        engine.add(bad)
    assert engine.stats().num_waiting == 1


@pytest.mark.parametrize(("gib", "tokens"), [(1e-6, 0), (5e-5, 208)])
def test_a_cache_that_does_not_hold_one_sequence_is_refused(qwen3: Family, gib: float, tokens: int) -> None:
    said = f"cache_memory_gib {gib} gives the KV cache room for {tokens} tokens, and model.max_model_len is 256"
    with pytest.raises(ValueError, match=said):
        qwen3.engine(cache_memory_gib=gib)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 442720),  # (0.9 * 140 - 34.8) GiB / 1.5, at 144 KiB a token
        ({"gpu_memory_utilization": 0.4}, 102912),
        ({"cache_memory_gib": 10.0}, 72816),
        ({"num_blocks": 2000}, 32000),
    ],
)
def test_on_a_gpu_the_cache_has_what_the_weights_leave_of_its_share(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], tokens: int
) -> None:
    """A model of Qwen3-8B's shape on a GPU of 140 GiB."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (125 * gib, 140 * gib))
    spec = ModelSpec("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, max_position=40960)
    config = InferenceConfig(model=InferenceModelConfig(max_model_len=16384), **settings)
    found = num_cache_blocks(spec, config, torch.bfloat16, "cuda:0", weights_bytes=int(34.8 * gib))
    assert found * config.block_size == tokens
    with pytest.raises(ValueError, match=r"gpu_memory_utilization 0.3 gives the KV cache room for \d+ tokens, and"):
        num_cache_blocks(
            spec,
            config.model_copy(update={"num_blocks": None, "cache_memory_gib": None, "gpu_memory_utilization": 0.3}),
            torch.bfloat16,
            "cuda:0",
            weights_bytes=40 * gib,
        )


def test_the_cache_is_as_large_as_is_of_use(qwen3: Family) -> None:
    assert qwen3.engine(max_num_seqs=4).limits.cache_tokens == 4 * 256


def test_weights_that_are_not_finite_are_reported(qwen3: Family) -> None:
    engine = qwen3.engine()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in engine.model.named_parameters()}
    engine.load_weights(broken, version=7)
    engine.add(request("r", "x"))
    assert engine.step() == []
    (failure,) = engine.failed.values()
    assert str(failure) == "request r: weights of version 7 give logits that are not finite"
    assert not engine.has_work()


def test_a_request_that_fails_fails_alone(qwen3: Family, greedy: dict[str, tuple[int, ...]]) -> None:
    engine = qwen3.engine()

    def decode(token_ids: list[int], skip_special_tokens: bool) -> str:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    engine._decode = decode
    engine.add(request("bad", PROMPTS[1], 24, stop=("x",)))
    engine.add(request("good", PROMPTS[0], 24))
    done: dict[str, Generation] = {}
    failed: dict[str, Exception] = {}
    while engine.has_work():
        done |= {generation.id: generation for generation in engine.step()}
        failed |= engine.failed
    assert done["good"].token_ids == greedy["0"]
    assert list(done) == ["good"]
    assert isinstance(failed["bad"], UnicodeEncodeError)
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_start|>x"])
def test_a_stop_string_with_special_tokens_stops_when_they_are_shown(qwen3: Family, stop: str) -> None:
    said = (20, IM_START, *qwen3.tokenizer.encode("x", add_special_tokens=False))
    one = request("r", "hi", 20, stop=(stop,), skip_special_tokens=False)
    engine = qwen3.engine()
    engine.add(replace(one, generated=said, logprobs=(-1.0,) * 3, versions=(0,) * 3))
    (generation,) = engine.step()
    assert (generation.token_ids, generation.finish_reason) == (said, "stop")


def test_stats(qwen3: Family) -> None:
    engine = qwen3.engine(max_num_seqs=2, num_blocks=20, version=4)
    for one in requests(4):
        engine.add(one)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_tokens, stats.version) == (2, 3, 2, 4)
    assert stats.cache_used == pytest.approx(2 / 20)
