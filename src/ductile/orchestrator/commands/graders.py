"""The graders of a run, which tell its record what became of rewards."""

from collections.abc import Mapping

from ductile.config.schema.orchestrator import GradersConfig, TaskConfig
from ductile.events.rollouts import GradersNotFenced, RewardError
from ductile.observe import Recorder
from ductile.tasks.grader import Graders


def graders_of(tasks: Mapping[str, TaskConfig | None], config: GradersConfig, record: Recorder) -> Graders:
    """tasks: by the name that calls use; None is left out."""

    def tell(sentence: str, traceback: str) -> None:
        record.event(RewardError(traceback, sentence=f"No reward: {sentence}."))

    return Graders(
        {name: task.model_dump() for name, task in tasks.items() if task is not None},
        config,
        on_error=tell,
        on_note=lambda sentence: record.event(GradersNotFenced(sentence=sentence)),
        log=record.folder / "logs" / "graders.log",
    )
