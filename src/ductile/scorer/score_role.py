"""The score role of one slot: log-probs of sampled tokens, as the trainer would compute them.

A scorer holds the policy, which follows published weights, and the reference: the weights that the run started from,
from disk, as soon as it begins where the loss needs them, and else when they are asked for. Of both each of its slots
has a part (`ductile.scorer.part`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from ductile.columns import Floats
from ductile.config.schema.trainer import TrainerConfig
from ductile.fabric import heap
from ductile.fabric.groups import Groups
from ductile.messages.workers import Done, Score, Scores
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import Manifest, Sample
from ductile.roles import RoleAssignment
from ductile.scorer.part import ScorerPart
from ductile.weights.instance_role import InstanceRole
from ductile.weights.overwrite import overwrite_parts


class ScoreRole(InstanceRole):
    """Follows `ductile.roles.SlotRole`. Every command goes to all slots of the scorer, which work in step; the first
    one replies with the scores.

    When one of them fails in the middle of it, it abandons its groups, so that the others get an error within
    milliseconds instead of waiting for the timeout. The role is lost then: release it and assign it anew.
    """

    does, peers = "scores", "scorers"

    def __init__(self, settings: Mapping[str, Any], assignment: RoleAssignment) -> None:
        """`settings` is a dumped `TrainerConfig`: the scorer computes in the trainer's precision. Collective over
        `assignment.layout`."""
        super().__init__(assignment)
        config = TrainerConfig.model_validate(settings)
        self._version = 0
        self._groups = Groups.at(assignment, config.dist_timeout_seconds)
        self._part: ScorerPart | None = None
        with self._in_step():
            context = ParallelContext(self._groups, assignment.layout)
            self._part = ScorerPart(config, context, assignment.device, has_weights=not assignment.joining)

    def handle(self, command: Any) -> Any:
        if not isinstance(command, Score):
            return super().handle(command)
        if command.model == "policy":
            self.needs_weights(command)
        with self._in_step():
            scores = self.score(command.samples, command.model)
            return Scores(tuple(scores)) if self._live.context.is_first else Done()

    def score(self, samples: tuple[Sample, ...], model: Literal["policy", "reference"]) -> list[Floats]:
        """Log-probs, one column a sample, as long as its tokens; 0 where the mask is false. Collective."""
        part = self._live
        scores: dict[int, Floats] = {}  # by the `id` of the sample: its value, all tokens, would be hashed
        for sample, column in part.score(samples, part.policy if model == "policy" else part.reference):
            scores[id(sample)] = column
        return [scores[id(sample)] for sample in samples]

    def live_weights(self) -> tuple[int, Iterator[tuple[str, Tensor]]]:
        return self._version, self._gathered()

    def offer(self) -> Manifest | None:
        """The first slot offers the whole tensors, the others help to gather them. When it fails half way, it still
        gathers the rest: the others are spared its failure."""
        version, weights = self.live_weights()
        try:
            return self._offered.offer(version, weights) if self._live.context.is_first else None
        finally:
            for _ in weights:
                pass

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        overwrite_parts(self._live.policy, self._live.parts, tensors, version)
        self._version = version

    def has_work(self) -> bool:
        return False

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        super().close()
        self._part = None  # before its groups: what refers to them would keep their sockets open
        self._groups.abort()  # another slot of the scorer may be dead
        heap.trim_all()

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        with self._in_step():
            yield from self._live.policy_weights()

    @property
    def _live(self) -> ScorerPart:
        if self._part is None:
            raise RuntimeError("the score role was lost in an earlier failure; release it and assign it anew")
        return self._part

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Guards what slots do in step: a failure inside ends the groups."""
        try:
            yield
        except Exception as error:
            self._part = None
            self._groups.abandon(error)
            raise
