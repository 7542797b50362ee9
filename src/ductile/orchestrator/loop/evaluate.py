"""Measures the policy on held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, nan

from ductile.concurrency.structured import gather_all
from ductile.core.batch.rewards import scored, too_many_failed
from ductile.events.steps import Evaluated
from ductile.observe import Recorder
from ductile.orchestrator.loop.episode import Episodes
from ductile.records import Prompt, Rollout, Sampling
from ductile.roles import Failure
from ductile.tasks.turn_text import sampled_text

SOLVED = 1.0
"""A reward from here on counts as solved in pass@k."""
NUM_SHOWN = 3
"""Prompts of which a report has a rollout for people to read."""
PRIORITY = 1
"""Priority of the evaluation's requests, above training's: the trainer waits for the result."""


class RewardsFailed(Failure):
    """Too many rewards failed to go on. The text says how many, of what, and how the last one failed."""

    code = "rewards_failed"


@dataclass(frozen=True, slots=True)
class Sampled:
    """One rollout for people to read."""

    prompt: str
    completion: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class EvalReport:
    reward_mean: float
    """Mean reward of the rollouts that could be scored; NaN when none could."""
    pass_at: dict[int, float]
    """pass@k, by k; the unbiased estimate where a prompt has more than k scored rollouts. A k for which no prompt has
    enough is left out."""
    length_mean: float
    """Mean sampled tokens of a rollout."""
    num_completions: int
    reward_error_share: float
    """Share of the rollouts that could not be scored, 0 to 1."""
    samples: tuple[Sampled, ...]
    step: int
    """Training step after which the policy was evaluated; 0 before any training."""

    def metrics(self) -> dict[str, float]:
        passes = {f"eval_pass_at_{k}": share for k, share in self.pass_at.items()}
        return {
            "eval_reward": self.reward_mean,
            "eval_length_mean": self.length_mean,
            "eval_reward_error_share": self.reward_error_share,
            **passes,
        }


class Evaluation:
    def __init__(
        self,
        episodes: Episodes,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        record: Recorder,
        samples_per_example: int = 1,
        max_reward_error_share: float = 1.0,
    ) -> None:
        self._episodes, self._prompts, self._sampling = episodes, prompts, sampling
        self._record, self._samples_per_example = record, samples_per_example
        self._max_reward_error_share = max_reward_error_share
        self.last: EvalReport | None = None

    @property
    def num_completions(self) -> int:
        """Rollouts that one `run` asks for."""
        return len(self._prompts) * self._samples_per_example

    async def run(self, step: int) -> EvalReport:
        """Ask every held-out prompt. Each generation's own deadline bounds it; the first failure is raised.

        Raises RewardsFailed when too many rollouts could not be scored.
        """
        asked = [(prompt, member) for prompt in self._prompts for member in range(self._samples_per_example)]
        rollouts = await gather_all(
            *(self._episodes.play(prompt, self._sampling, member, PRIORITY) for prompt, member in asked)
        )
        if why := too_many_failed(rollouts, self._max_reward_error_share):
            raise RewardsFailed(f"in the evaluation after step {step}, {why}")
        self.last = self._report(rollouts, step)
        reward = self.last.reward_mean
        how = "greedy completions" if self._sampling.temperature == 0 else "completions"
        sentence = f"Held-out reward after step {step}: {reward:.3f}, over {len(rollouts)} {how}."
        self._record.event(Evaluated(step, reward, sentence=sentence))
        return self.last

    def _report(self, rollouts: list[Rollout], step: int) -> EvalReport:
        n = self._samples_per_example
        by_prompt = [rollouts[start : start + n] for start in range(0, len(rollouts), n)]
        rewards = scored(rollouts)
        solved = [(len(each), sum(reward >= SOLVED for reward in each)) for each in map(scored, by_prompt)]
        return EvalReport(
            reward_mean=_mean(rewards) if rewards else nan,
            pass_at={
                k: _mean(shares)
                for k in (1 << power for power in range(n.bit_length()))
                if (shares := [pass_at_k(num, num_solved, k) for num, num_solved in solved if num >= k])
            },
            length_mean=_mean([float(rollout.num_sampled) for rollout in rollouts]),
            num_completions=len(rollouts),
            reward_error_share=1 - len(rewards) / max(1, len(rollouts)),
            step=step,
            samples=tuple(
                Sampled(
                    prompt=self._episodes.tasks[prompt.task].messages(prompt.example)[-1]["content"],
                    completion=sampled_text(self._episodes.tokenizer, prompt.token_ids, group[0].token_ids),
                    reward=group[0].reward,
                )
                for prompt, group in zip(self._prompts[:NUM_SHOWN], by_prompt, strict=False)
            ),
        )


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The chance that at least one of `k` samples, drawn from these without putting back, is solved.

    Example: of 4 samples 1 is solved: pass@1 = 0.25, pass@2 = 0.5, pass@4 = 1.
    """
    return 1 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
