"""Conversations as training samples, and made-up ones."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ductile.columns import Floats, Mask, TokenIds
from ductile.records import NO_FLOATS, Sample
from ductile.tasks.conversation import ChatTokenizer, as_written, end_of_turn, first_turn, next_turn
from ductile.tasks.rows import conversation, read_rows
from ductile.tasks.task import TaskError

TextMessage = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Conversations:
    """A data set, ready to train on."""

    samples: tuple[Sample, ...]
    num_cut: int
    """Samples that were longer than `seq_len`."""
    num_skipped: int
    """Samples that had nothing left to train on after the cut."""


def read_conversations(
    path: str, tokenizer: ChatTokenizer, seq_len: int, loss_on: Literal["assistant", "all"]
) -> Conversations:
    """Raises TaskError with file and line, also when nothing is left to train on."""
    samples, num_cut, num_skipped = list[Sample](), 0, 0
    for where, row in read_rows(path):
        token_ids, mask = tokenise(tokenizer, conversation(where, row, ends_with="completion"), loss_on)
        num_cut += len(token_ids) > seq_len
        if any(mask[:seq_len]):
            samples.append(Sample(TokenIds(token_ids[:seq_len]), Mask(mask[:seq_len])))
        else:
            num_skipped += 1
    if not samples:
        raise TaskError(f"{path}: no completion begins within seq_len = {seq_len} tokens; raise data.seq_len")
    return Conversations(tuple(samples), num_cut, num_skipped)


def tokenise(
    tokenizer: ChatTokenizer, messages: Sequence[TextMessage], loss_on: Literal["assistant", "all"] = "assistant"
) -> tuple[list[int], list[bool]]:
    """(token ids, trained or not). The same tokens that a generator sees and samples, turn by turn; each completion
    ends as the chat template ends it. What follows the last completion is left out.

    Example, completions in capitals:   user: hi   assistant: YO   user: and   assistant: ME
        <user>hi<end><assistant>    F F F F
        YO<end>                     T T
        <user>and<end><assistant>   F F F F
        ME<end>                     T T
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    first = messages[: turns[0]]
    end = end_of_turn(tokenizer, first)
    token_ids = first_turn(tokenizer, first)
    mask = [False] * len(token_ids)
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        content = as_written(tokenizer, first, messages[turn]["content"])
        completion = tokenizer.encode(content, add_special_tokens=False) + end
        token_ids += completion
        mask += [True] * len(completion)
        if following is not None:
            between = next_turn(tokenizer, first, completion, messages[turn + 1 : following])
            token_ids += between
            mask += [False] * len(between)
    if loss_on == "all":
        mask = [True] * len(mask)
    return token_ids, [False, *mask[1:]]  # nothing precedes the first token, so nothing predicts it


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
