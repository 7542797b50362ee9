"""Conversations as training samples, and made-up ones."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from ductile.columns import Floats, Mask, TokenIds
from ductile.records import NO_FLOATS, Sample
from ductile.tasks.conversation import first_turn, next_turn
from ductile.tasks.left_out import LeftOut
from ductile.tasks.rendered import render
from ductile.tasks.rows import ChatRow, Row, conversation_of, read_rows, text_of
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import Tokenizer, TokenizerError

LossOn = Literal["assistant", "all"]


@dataclass(slots=True)
class RowCounts:
    """Rows of which something is to be told."""

    cut: int = 0
    """Rows that were longer than `longest`."""
    skipped: int = 0
    """Rows that had nothing left to train on after the cut, or say so themselves (`weight: 0`)."""
    open: int = 0
    """Rows whose last trained token ends no generation: a policy that is trained on them alone may never stop."""
    unprompted: int = 0
    """Rows whose last turn does not begin as the generation prompt does."""
    straddling: int = 0
    """Rows in which a token has a part of the generation prompt and a part of the completion."""
    control: int = 0
    """Rows with words that spell a token by which the chat template begins or ends a turn."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """A data set, ready to train on."""

    samples: tuple[Sample, ...]
    counts: RowCounts
    rows: tuple[Row, ...] = ()
    """All rows as the file has them, also those of which no sample is made."""
    unprompted: str = ""
    """Generation prompt of the first of `counts.unprompted`."""
    control: str = ""
    """Control token of the first of `counts.control`, with file and line."""


def read_conversations(path: str, tokenizer: Tokenizer, longest: int, loss_on: LossOn) -> Conversations:
    """longest: tokens of a sample. Raises TaskError with file and line, also when nothing is left to train on."""
    samples, counts, any_trained = list[Sample](), RowCounts(), False
    unprompted = control = ""
    rows = read_rows(path)
    for where, row in rows:
        tokens = tokenise(where, row, tokenizer, loss_on)
        counts.cut += len(tokens.ids) > longest
        any_trained |= any(tokens.trained)
        if any(tokens.trained[:longest]):
            samples.append(Sample(TokenIds(tokens.ids[:longest]), Mask(tokens.trained[:longest])))
            counts.open += loss_on == "assistant" and tokens.last_trained not in tokenizer.eos_token_ids
            counts.unprompted += bool(tokens.unprompted)
            counts.straddling += tokens.straddles
            counts.control += bool(tokens.control)
            unprompted = unprompted or tokens.unprompted
            control = control or (f"{tokens.control} in {where}" if tokens.control else "")
        else:
            counts.skipped += 1
    if not samples and not any_trained:
        raise TaskError(f"{path}: nothing is trained, as each row says (weight: 0 or train: false)")
    if not samples:
        limits = "data.seq_len and the model's max_position_embeddings"
        raise TaskError(f"{path}: no completion begins within {longest} tokens, the least of {limits}")
    return Conversations(tuple(samples), counts, tuple(row for _, row in rows), unprompted, control)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """A row's tokens, and for each whether it is trained."""

    ids: list[int]
    trained: list[bool]
    unprompted: str = ""
    """Generation prompt that the last turn does not begin with (`ductile.tasks.rendered.Rendered`)."""
    straddles: bool = False
    """True where a token has a part of the generation prompt and a part of the completion."""
    control: str = ""
    """Control token that the row's words spell."""

    @property
    def last_trained(self) -> int | None:
        return next((token for token, trained in zip(self.ids[::-1], self.trained[::-1], strict=True) if trained), None)


def tokenise(where: str, row: Row, tokenizer: Tokenizer, loss_on: LossOn = "assistant") -> RowTokens:
    """Return a row's tokens: those of the whole conversation as the chat template renders it.

    Example, trained tokens in capitals: `<user>hi<end><assistant>YO<END><user>and<end><assistant>ME<END>`

    Raises TaskError, with the row's file and line, where the template refuses the conversation or drops a part of it.
    """
    if (text := text_of(where, row)) is not None:
        if loss_on == "assistant":
            raise TaskError(f'{where}: is plain text, in which no part is the assistant\'s; set data.loss_on = "all"')
        ids = [*tokenizer.encode(text), *tokenizer.eos_token_ids[:1]]
        tokens = RowTokens(ids, [True] * len(ids))
    else:
        chat = conversation_of(where, row)
        if chat.untrained and loss_on == "all":
            raise TaskError(f'{where}: has weight: 0 or train: false, and data.loss_on = "all" trains everything')
        try:
            tokens = _rendered(tokenizer, chat) if tokenizer.chat_template else _joined(tokenizer, chat)
        except (LeftOut, TokenizerError) as error:
            raise TaskError(f"{where}: {error}") from None
    trained = [True] * len(tokens.ids) if loss_on == "all" else tokens.trained
    return replace(tokens, trained=[False, *trained[1:]])  # nothing precedes the first token, so nothing predicts it


def _rendered(tokenizer: Tokenizer, chat: ChatRow) -> RowTokens:
    rendered = render(tokenizer, chat.messages, chat.untrained, **chat.variables)
    ids, trained, straddles = tokenizer.encode_spans(rendered.text, rendered.assistant)
    return RowTokens(ids, trained, rendered.unprompted, straddles, tokenizer.control_token_in(chat.messages) or "")


def _joined(tokenizer: Tokenizer, chat: ChatRow) -> RowTokens:
    """Return the turns of a model without a chat template, as its rollouts have them: the texts, a line each, and an
    end of text behind each of the assistant's."""
    messages, end = chat.messages, list(tokenizer.eos_token_ids[:1])
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    token_ids = first_turn(tokenizer, messages[: turns[0]], **chat.variables)
    mask = [False] * len(token_ids)
    for place, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        said = tokenizer.encode(str(messages[place]["content"]), add_special_tokens=False) + end
        token_ids += said
        mask += [place not in chat.untrained] * len(said)
        if reply := messages[place + 1 : following]:
            between = next_turn(tokenizer, messages[: turns[0]], said, reply)
            token_ids += between
            mask += [False] * len(between)
    return RowTokens(token_ids, mask)


def marked(tokenizer: Tokenizer, sample: Sample) -> str:
    """Return a sample as the model sees it, its trained parts in brackets: `<user>hi<end><assistant>[[yo<end>]]`."""
    return "".join(_marked_runs(tokenizer, sample))


def _marked_runs(tokenizer: Tokenizer, sample: Sample) -> Iterator[str]:
    tokens = zip(sample.token_ids, sample.loss_mask, strict=True)
    for trained, run in groupby(tokens, key=lambda token: bool(token[1])):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        yield f"[[{text}]]" if trained else text


def fake_samples(
    num_samples: int,
    seq_len: int,
    vocab_size: int,
    *,
    step: int,
    variable: bool = False,
    random_ids: bool = False,
    for_rl: bool = False,
) -> list[Sample]:
    """Made-up samples of `seq_len` tokens, or of 2 to `seq_len` when `variable`; the same for the same arguments."""
    draw = random.Random(f"fake/{step}")
    samples: list[Sample] = []
    for _ in range(num_samples):
        length = draw.randint(2, seq_len) if variable else seq_len
        ids = [draw.randrange(vocab_size) if random_ids else i % vocab_size for i in range(length)]
        mask = Mask.full(1, False) + Mask.full(length - 1, True)
        advantage = draw.choice((-1.0, 1.0))
        samples.append(
            Sample(
                token_ids=TokenIds(ids),
                loss_mask=mask,
                rollout_logprobs=Floats(-1.0 * mask.array) if for_rl else NO_FLOATS,
                advantages=Floats(advantage * mask.array) if for_rl else NO_FLOATS,
            )
        )
    return samples
