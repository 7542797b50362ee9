"""`ductile orchestrator`: ask a running server, score its completions, train nothing.

rollouts.jsonl   one line a completion: prompt, completion, reward, token ids, log-probs
metrics.jsonl    one line a batch
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ductile.concurrency.structured import gather_all
from ductile.config.schema.orchestrator import to_sampling
from ductile.config.schema.run import OrchestratorRunConfig
from ductile.core.batch.rewards import too_many_failed
from ductile.events.steps import BatchesReady
from ductile.observe import Recorder, Stopwatch
from ductile.orchestrator.commands.graders import graders_of
from ductile.orchestrator.ending.run_summary import per_second, since_start
from ductile.orchestrator.loop.episode import Episodes
from ductile.orchestrator.loop.evaluate import RewardsFailed
from ductile.orchestrator.loop.step_metrics import StepMetrics
from ductile.records import Prompt, RolloutGroup
from ductile.roles import Generators, Task
from ductile.surrogates import ESCAPED
from ductile.tasks.build import build_task
from ductile.tasks.prompts import ExampleOrder, Prompts, check_prompts
from ductile.tasks.tokenizer import Tokenizer
from ductile.tasks.turn_text import sampled_text

MAX_LEN_TOKENS = 1 << 20
"""The server knows its own limit, and says so."""


@dataclass(frozen=True, slots=True)
class PreparedRolloutOnly:
    config: OrchestratorRunConfig
    tokenizer: Tokenizer
    task: Task
    max_steps: int


def prepare_rollout_only(config: OrchestratorRunConfig) -> PreparedRolloutOnly:
    """Raises TaskError or TokenizerError, each with a sentence."""
    assert config.task is not None, "preflight asks for a task"
    task = build_task(config.task)
    one_epoch = max(1, len(task) * config.rollouts_per_example // config.batch_size)
    max_steps = config.bench.steps if config.bench else config.max_steps or one_epoch
    tokenizer = Tokenizer.of(config.model)
    check_prompts(task, tokenizer, range(len(task)))  # what raises is found before the start
    return PreparedRolloutOnly(config, tokenizer, task, max_steps)


async def run_rollout_only(
    prepared: PreparedRolloutOnly, generators: Generators, record: Recorder, stop: asyncio.Event
) -> dict[str, Any]:
    """Batch after batch, until `max_steps` or `stop`. Returns the summary."""
    config, tokenizer, tasks = prepared.config, prepared.tokenizer, {"train": prepared.task}
    began_s, watch, step = time.perf_counter(), Stopwatch(), 0
    if tokenizer.dated:
        record.event(BatchesReady(sentence=tokenizer.dated))
    order = ExampleOrder(range(len(prepared.task)), config.seed, config.shuffle)
    prompts = Prompts(prepared.task, tokenizer, order, MAX_LEN_TOKENS)
    sampling, group_size = to_sampling(config.sampling), config.rollouts_per_example
    if not sampling.ignore_eos:  # whatever the server takes for the end of a turn
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *tokenizer.eos_token_ids))
    async with graders_of({"train": config.task}, config.graders, record) as graders:
        episodes = Episodes(tasks, tokenizer, generators, graders, MAX_LEN_TOKENS)
        seats = asyncio.Semaphore(generators.capacity)

        async def play(prompt: Prompt, member: int):
            async with seats:
                return await episodes.play(prompt, sampling, member)

        async def rollout_group(prompt: Prompt) -> RolloutGroup:
            return RolloutGroup(prompt, tuple(await gather_all(*(play(prompt, m) for m in range(group_size)))))

        for step in range(1, prepared.max_steps + 1):
            batch = [prompts.next_prompt() for _ in range(config.batch_size // group_size)]
            groups = await gather_all(*(rollout_group(prompt) for prompt in batch))
            write_rollouts(record.folder / "rollouts.jsonl", step, groups, prepared)
            step_metrics = StepMetrics(version=0)
            step_metrics.add(groups, report=None)
            values = {**step_metrics.row(*watch.lap()), **graders.counts()}
            record.metrics(step, {name: value for name, value in values.items() if "off_policy" not in name})
            if why := too_many_failed(step_metrics.rollouts, config.graders.max_error_share):
                raise RewardsFailed(f"in batch {step}, {why}")
            if stop.is_set():
                break
    rows = record.rows()
    rewards = [row["reward_mean"] for row in rows if row["reward_mean"] is not None]
    since_start_s = time.perf_counter() - began_s
    summary = {
        "steps": step,
        "reward_mean": sum(rewards) / max(1, len(rewards)),
        "wall_s": since_start_s,
        **since_start(prepared.max_steps, 0, since_start_s),
        "tokens_per_s_generate": per_second(rows, "sampled_tokens", ["step_s"]),
        "reward_errors": graders.num_errors,
    }
    record.summary(summary)
    return summary


def write_rollouts(file: Path, step: int, groups: Sequence[RolloutGroup], prepared: PreparedRolloutOnly) -> None:
    with file.open("a", encoding="utf-8", errors=ESCAPED) as stream:
        for group in groups:
            prompt = prepared.task.messages(group.prompt.example)[-1]["content"]
            for rollout in group.rollouts:
                completion = sampled_text(prepared.tokenizer, group.prompt.token_ids, rollout.token_ids)
                texts = {"prompt": prompt, "completion": completion}
                row = {"step": step, "prompt_id": group.prompt.id, **texts, **asdict(rollout)}
                row["prompt_token_ids"] = group.prompt.token_ids
                stream.write(json.dumps(row, ensure_ascii=False, default=list) + "\n")
