"""Prompts and rewards without words: what the real loop needs of a task, a tokenizer and graders, at no cost."""

from collections.abc import Sequence

from ductile.records import Completion
from ductile.roles import Task
from ductile.tasks.conversation import Messages
from ductile.tasks.grader import Graded, Graders, TaskReply


class Blocks:
    """A tokenizer of one token: a letter of a prompt is a block of tokens, and completions say nothing."""

    chat_template = None
    eos_token_ids: tuple[int, ...] = (0,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * len(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


class SimulatedTask(Task):
    """Prompts, as many as are needed, all of one length."""

    name = "simulated"

    def __init__(self, size: int, num_blocks: int) -> None:
        self._size, self._text = size, "x" * num_blocks

    def __len__(self) -> int:
        return self._size

    def messages(self, example: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._text}]

    def reward(self, example: int, completion: str) -> float:
        return 0.0


class NoGraders(Graders):
    """Every completion scores 0 at once; such groups are trained on like others (`drop_zero_advantage` is off)."""

    def __init__(self) -> None:
        """No processes."""

    async def reward(self, task: str, example: int, completion: Completion) -> Graded:
        return Graded(0.0, {})

    async def reply(self, task: str, example: int, messages: Messages) -> TaskReply:
        return TaskReply(None)
