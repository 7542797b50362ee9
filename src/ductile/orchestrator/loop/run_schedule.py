"""How many steps a run has, what one consists of, and when the policy is evaluated."""

from dataclasses import dataclass

from ductile.core.rollouts.staleness import StalenessBound
from ductile.elastic.step_accounting import StepSize


@dataclass(frozen=True, slots=True)
class RunSchedule:
    max_steps: int
    staleness: StalenessBound
    """Groups of a step, and how far generation may run ahead of it."""
    group_size: int
    """Rollouts of a prompt."""
    n_minibatches: int = 1
    """Optimizer steps in each step."""
    seq_len: int = 2048
    max_skipped_steps: int | None = None
    """Optimizer steps in a row without a finite gradient that end the run."""
    eval_interval: int | None = None
    """Steps from one evaluation to the next; None: only the first weights and the last are evaluated."""
    max_reward_error_share: float = 1.0
    """Share of a step's rewards that may fail, 0 to 1; when more fail, the run ends."""

    @property
    def groups_per_step(self) -> int:
        return self.staleness.groups_per_step

    def evaluates_after(self, step: int) -> bool:
        return step == self.max_steps or (self.eval_interval is not None and step % self.eval_interval == 0)

    def step_size(self, *, scores: bool) -> StepSize:
        """scores: samples go to a scorer before the trainer gets them."""
        return StepSize(
            self.max_steps, self.groups_per_step, self.group_size, self.n_minibatches, self.staleness.ahead, scores
        )
