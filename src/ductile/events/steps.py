"""Events of the work: what a run has to do, and what its steps are like."""

from collections.abc import Mapping
from typing import Any, Self

from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.observe import RunEvent


class WorkBegan(RunEvent, tag="setting", frozen=True):
    """The slots have their roles and the work begins. The fields of its line are those of the run's `Setting`."""

    setting: Setting

    def as_fields(self) -> dict[str, Any]:
        return self.setting.as_fields()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        return cls(setting=Setting.from_fields(row), sentence=row["sentence"], time_s=row["time"])


class StepProfiled(RunEvent, tag="profile", frozen=True):
    """A step is done. The fields of its line are those of its `StepProfile`."""

    profile: StepProfile

    def as_fields(self) -> dict[str, Any]:
        return self.profile.as_fields()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        return cls(profile=StepProfile.from_fields(row), sentence=row["sentence"], time_s=row["time"])


class BatchesReady(RunEvent, tag="data", frozen=True):
    """The batches are there that `ductile sft` or `ductile trainer` takes, or something is to be said of the prompts of
    `ductile rl` and `ductile orchestrator`, which have no counts, as batches that are made up."""

    samples: int | None = None
    samples_cut: int | None = None
    """Samples that are cut to the longest length."""
    samples_skipped: int | None = None
    """Samples that are left out."""


class NothingToLearn(RunEvent, tag="nothing_to_learn", frozen=True):
    """No rollout of an optimizer step beats its siblings, in any group; the weights stay as they are."""


class StepSkipped(RunEvent, tag="step_skipped", frozen=True):
    """An optimizer step is thrown away because its gradient is not finite."""

    step: int
    """Number of the optimizer step."""
    in_a_row: int
    """Optimizer steps up to this one that were thrown away one after the other."""


class Evaluated(RunEvent, tag="evaluated", frozen=True):
    """Held-out prompts are scored."""

    step: int
    """Training steps that were done before."""
    reward: float | None
    """Mean reward of the rollouts that could be scored; NaN, and null on disk, where none could."""
