"""Which prompt comes next, and which were taken and not yet trained on.

Position `p` in the endless list of prompts is epoch `p // n`, place `p % n` of that epoch's order. The state of a
run is therefore one number and a short list: the next position, and the positions that are under way.
"""

import random
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ductile.columns import TokenIds
from ductile.core.instances.placement import many
from ductile.records import Prompt
from ductile.roles import Task
from ductile.tasks.conversation import ChatTokenizer, first_turn
from ductile.tasks.jsonl import JsonlDataset
from ductile.tasks.left_out import LeftOut
from ductile.tasks.task import TaskError, messages_of, source_of, variables_of
from ductile.tasks.tokenizer import TokenizerError


class ExampleOrder:
    """Each epoch goes through all examples once, shuffled by `seed` and epoch, or as they are.

    Example: `ExampleOrder([7, 8, 9], shuffle=False)[4]` is `(1, 8)`: epoch 1, example 8.
    """

    def __init__(self, examples: Sequence[int], seed: int = 0, shuffle: bool = True) -> None:
        if not examples:
            raise TaskError("there are no examples to train on")
        self._examples, self._seed, self._shuffle = examples, seed, shuffle
        self._epoch, self._order = -1, list[int]()

    def __len__(self) -> int:
        """Examples an epoch."""
        return len(self._examples)

    def __getitem__(self, position: int) -> tuple[int, int]:
        """(epoch, example)"""
        epoch, place = divmod(position, len(self._examples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(self._examples)
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return epoch, self._order[place]


def pass_in_words(size: int, num_steps: int, step_size: int, what: str) -> str:
    """Return a sentence where the steps of one pass do not take each of `size` samples, or prompts, once; else ""."""
    left, steps = size - num_steps * step_size, f"One pass is {many(num_steps, 'step')} of {step_size}"
    if left > 0:
        return f"{steps}, and there are {many(size, what)}: {left} of them {'is' if left == 1 else 'are'} not taken."
    passes = "a second pass" if -left <= size else "further passes"
    return f"{steps}, and there are {many(size, what)}: {-left} of the last step are of {passes}." if left else ""


def split(num_examples: int, num_held_out: int) -> tuple[range, range]:
    """(to train on, held out): the last ones are never trained on. Raises TaskError when training would have none."""
    if num_examples <= num_held_out:
        raise TaskError(
            f"the task has {num_examples} examples, and evaluation holds out its last {num_held_out} "
            f"(orchestrator.eval.num_examples): none are left to train on. Write --orchestrator.eval.num-examples "
            f"{max(1, num_examples // 4)}, or give evaluation a task of its own (orchestrator.eval.task)"
        )
    return range(num_examples - num_held_out), range(num_examples - num_held_out, num_examples)


@dataclass(frozen=True, slots=True)
class PromptPosition:
    """What a checkpoint keeps of `Prompts`."""

    next: int = 0
    under_way: tuple[int, ...] = ()


class Prompts:
    """Gives every example once an epoch: `next_prompt`, then `mark_trained`, or `requeue` if its rollouts were dropped.

    After a resume, what was under way at the save comes first, in the same order.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: ChatTokenizer,
        order: ExampleOrder,
        max_tokens: int,
        position: PromptPosition | None = None,
        on_too_long: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """max_tokens: of a prompt; longer ones are skipped. on_too_long: told of it in a sentence."""
        position = position or PromptPosition()
        self._task, self._tokenizer, self._order = task, tokenizer, order
        self._max_tokens, self._on_too_long = max_tokens, on_too_long
        self._next = position.next
        self._again = deque(position.under_way)
        self._under_way: dict[str, int] = {}

    def next_prompt(self) -> Prompt:
        """Raises TaskError when an epoch long nothing fits into `max_tokens`."""
        for _ in range(len(self._order) + len(self._again) + 1):
            position = self._again.popleft() if self._again else self._advance()
            prompt = self._prompt(position)
            if len(prompt.token_ids) <= self._max_tokens:
                self._under_way[prompt.id] = position
                return prompt
            self._on_too_long(f"Skipped {prompt.id}: {len(prompt.token_ids)} tokens, at most {self._max_tokens} fit.")
        raise TaskError(
            f"every prompt of {self._task.name} has more than {self._max_tokens} tokens; raise seq_len "
            f"(inference.model.max_model_len, trainer.model.seq_len)"
        )

    def mark_trained(self, prompt: Prompt) -> None:
        """The optimizer has used its rollouts."""
        del self._under_way[prompt.id]

    def requeue(self, prompt: Prompt) -> None:
        """Its rollouts are of no use: it is the next one to be asked."""
        self._again.appendleft(self._under_way.pop(prompt.id))

    def position(self) -> PromptPosition:
        return PromptPosition(self._next, tuple(sorted([*self._under_way.values(), *self._again])))

    def _advance(self) -> int:
        self._next += 1
        return self._next - 1

    def _prompt(self, position: int) -> Prompt:
        epoch, example = self._order[position]
        token_ids = prompt_ids(self._task, self._tokenizer, example)
        return Prompt(f"train/{epoch}/{example}", "train", example, TokenIds(token_ids))


def prompt_ids(task: Task, tokenizer: ChatTokenizer, example: int) -> list[int]:
    """Return the tokens that ask an example. Raises TaskError, with the example's source, when the chat template
    refuses the messages or drops a part of them."""
    try:
        return first_turn(tokenizer, messages_of(task, example), **variables_of(task, example))
    except (LeftOut, TokenizerError) as error:
        raise TaskError(f"{source_of(task, example)}: {error}") from None


def check_prompts(task: Task, tokenizer: ChatTokenizer, examples: Sequence[int]) -> str:
    """Look at prompts before the first is asked; return a sentence for those that spell a control token, else "".

    One prompt of each shape is rendered, as prompts of one shape take one path through the chat template. Raises
    TaskError for one that it cannot express.
    """
    shapes, spelled = set[object](), list[str]()
    for example in examples[: NUM_ROWS if isinstance(task, JsonlDataset) else NUM_MADE]:
        messages = messages_of(task, example)
        shape = tuple((message["role"], *sorted(message)) for message in messages), *variables_of(task, example)
        if shape not in shapes:
            shapes.add(shape)
            prompt_ids(task, tokenizer, example)
        if tokenizer.chat_template is not None and (token := tokenizer.chat_template.control_token_in(messages)):
            spelled.append(f"{token} in {source_of(task, example)}")
    if not spelled:
        return ""
    what = "have words that spell a special token of the chat template, which begins or ends a turn there"
    return f"{len(spelled)} prompts {what}: {spelled[0]} is the first"


NUM_ROWS, NUM_MADE = 10_000, 64
"""Prompts that are looked at before a run: of a file, and of a task that makes each when it is asked for."""


MOST_NAMED = 3
"""Held-out rows that a sentence names."""


def repeated(train: JsonlDataset, examples: Iterable[int], task: JsonlDataset, held_out: Iterable[int]) -> str:
    """Return a sentence for the held-out rows whose prompt is also one of the rows that are trained on; "" without any.

    Prompts are the same where their messages are, but for spaces and for how Unicode spells a character.

    examples: those of `train` that are trained on. task: the one of the held-out rows.
    """
    trained = {_key(train, example): example for example in reversed(list(examples))}
    asked = list(held_out)
    twins = [(example, trained[key]) for example in asked if (key := _key(task, example)) in trained]
    if not twins:
        return ""
    places = [f"{task.source(one)} is {train.source(other)}" for one, other in twins[:MOST_NAMED]]
    more = f", and {len(twins) - MOST_NAMED} more" if len(twins) > MOST_NAMED else ""
    verb = "is" if len(twins) == 1 else "are"
    count = f"{len(twins)} of the {many(len(asked), 'held-out prompt')} {verb} trained on, too"
    return f"{count}: {', '.join(places)}{more}. What they measure is also what was learned by heart"


def _key(task: JsonlDataset, example: int) -> str:
    return repr([{name: _plain(value) for name, value in message.items()} for message in messages_of(task, example)])


def _plain(value: object) -> object:
    return " ".join(unicodedata.normalize("NFKC", value).split()) if isinstance(value, str) else value
