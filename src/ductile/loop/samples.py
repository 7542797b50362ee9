"""`samples.jsonl`: some rollouts of each step with their rewards, for people to read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ductile.disk import write_whole
from ductile.observe import read_jsonl
from ductile.records import Prompt, Rollout, RolloutGroup
from ductile.roles import Task
from ductile.tasks.conversation import ChatTokenizer


class SampleLog:
    """Appends to the file; what an earlier life wrote of steps that are repeated is dropped first."""

    def __init__(
        self, file: Path, tasks: Mapping[str, Task], tokenizer: ChatTokenizer, per_step: int, done: int = 0
    ) -> None:
        """per_step: at most so many rollouts of a step. done: the last step that is not repeated."""
        self._file, self._tasks, self._tokenizer, self._per_step = file, tasks, tokenizer, per_step
        if file.exists():
            rows = [row for row in read_jsonl(file) if row["step"] <= done]
            write_whole(file, "".join(f"{json.dumps(row)}\n" for row in rows))

    def keep(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        chosen = choose(groups, self._per_step)
        if not chosen:
            return
        with self._file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            for prompt, rollout in chosen:
                stream.write(f"{json.dumps(self._row(step, prompt, rollout), ensure_ascii=False)}\n")

    def _row(self, step: int, prompt: Prompt, rollout: Rollout) -> dict[str, object]:
        return {
            "step": step,
            "prompt": prompt.id,
            "question": self._tasks[prompt.task].messages(prompt.example)[-1]["content"],
            "completion": self._tokenizer.decode(rollout.token_ids),
            "reward": rollout.reward,
            "metrics": rollout.metrics,
            "error": rollout.error,
            "finish_reason": rollout.finish_reason,
            "num_tokens": sum(rollout.mask),
            "num_turns": rollout.num_turns,
        }


def choose(groups: Sequence[RolloutGroup], num: int) -> list[tuple[Prompt, Rollout]]:
    """The first member of each group, then the second of each, and so on: as many prompts as can be, good or bad."""
    size = max((len(group.rollouts) for group in groups), default=0)
    members = [
        (group.prompt, group.rollouts[member])
        for member in range(size)
        for group in groups
        if member < len(group.rollouts)
    ]
    return members[:num]
