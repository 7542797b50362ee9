"""What a text may cost before it is refused, and who waits for whom."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from ductile.config.schema.inference import ServerConfig
from ductile.generator.engine.limits import Overloaded, RequestRefused, SequenceLimits
from ductile.generator.server.prompt_text import CHARS_A_TOKEN, LARGE_CHARS, SURELY, PromptEncoder
from ductile.generator.server.server import create_app
from ductile.tasks.tokenizer import Tokenizer
from tests.generator.conftest import Family
from tests.generator.test_server import local

MAX_MODEL_LEN = 50


class Watched(Tokenizer):
    """It says what it was given, and works on a text of x only while it may."""

    def __init__(self) -> None:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
        backend.add_tokens([" " * 128])  # as real vocabularies have them
        super().__init__(backend, {}, [], None)
        self.given: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def encode_beside(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.given.append(text)
        if text.startswith("x"):
            assert self.may_go_on.wait(60)
        return super().encode_beside(text, add_special_tokens)


@pytest.fixture
def watched() -> Iterator[Watched]:
    tokenizer = Watched()
    yield tokenizer
    tokenizer.may_go_on.set()


def encoder(tokenizer: Tokenizer, max_model_len: int = MAX_MODEL_LEN, max_waiting_chars: int = 10**9) -> PromptEncoder:
    return PromptEncoder(tokenizer, SequenceLimits(400, max_model_len, 10**6), max_waiting_chars)


def test_of_a_text_that_is_far_too_long_only_a_beginning_is_tokenised(watched: Watched) -> None:
    for text in ("qzj" * 2000, "the quick brown fox " * 300):
        watched.given.clear()
        with pytest.raises(RequestRefused, match="the prompt has more than 50 tokens"):
            asyncio.run(encoder(watched).encode([text], True))
        num_tokens = sum(len(Tokenizer.encode_beside(watched, part)) for part in watched.given)
        assert num_tokens < 2 * max(CHARS_A_TOKEN, 2 * SURELY) * MAX_MODEL_LEN


def test_after_a_text_that_is_too_long_no_other_is_tokenised(watched: Watched) -> None:
    with pytest.raises(RequestRefused, match="the prompt has 60 tokens"):
        asyncio.run(encoder(watched).encode(["a", "q" * 60, "b"], True))
    assert watched.given == ["a", "q" * 60]


WATCHED = Watched()


@given(st.lists(st.text(" abcdefox\u20ac", max_size=120) | st.integers(0, 30).map("the lazy dog ".__mul__), max_size=4))
def test_texts_that_fit_are_tokenised_as_ever(texts: list[str]) -> None:
    expected = [WATCHED.encode(text) for text in texts]
    if max(map(len, expected), default=0) < MAX_MODEL_LEN:
        assert asyncio.run(encoder(WATCHED).encode(texts, True)) == expected
    else:
        with pytest.raises(RequestRefused):
            asyncio.run(encoder(WATCHED).encode(texts, True))


def test_large_texts_take_turns_and_small_ones_do_not_wait(watched: Watched) -> None:
    large = "x" * (LARGE_CHARS + 1)

    async def ask() -> None:
        prompts = encoder(watched, 10**6, max_waiting_chars=3 * len(large))
        watched.may_go_on.clear()
        first, second, gone = (asyncio.create_task(prompts.encode([large], True)) for _ in range(3))
        assert await asyncio.wait_for(prompts.encode(["small"], True), 60) == [watched.encode("small")]
        with pytest.raises(Overloaded, match="too many large prompts at once"):
            await prompts.encode([large], True)
        gone.cancel()
        assert watched.given.count(large) <= 1
        watched.may_go_on.set()
        assert await asyncio.wait_for(first, 60) == await asyncio.wait_for(second, 60) == [watched.encode(large)]
        assert watched.given.count(large) == 2, "what nobody waits for any more costs nothing"
        assert await asyncio.wait_for(prompts.encode([large], True), 60) == [watched.encode(large)]

    asyncio.run(ask())


def test_too_many_prompts_are_refused_before_they_are_tokenised(qwen3: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(Tokenizer, "encode_beside", lambda self, text, *_: given.append(text))
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny", ServerConfig(max_sequences=8))) as client:
        for body in ({"prompt": ["x"] * 9}, {"prompt": "x", "n": 9}):
            response = client.post("/v1/completions", json=body)
            assert (response.status_code, "server.max_sequences allows 8" in response.text) == (400, True)
        chat = {"messages": [{"role": "user", "content": "x"}], "n": 9}
        assert client.post("/v1/chat/completions", json=chat).status_code == 400
    assert given == []
