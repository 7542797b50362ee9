"""Any data set of reasoning-gym, by name, with its own configuration and its own scorer."""

import sys
from dataclasses import fields
from typing import Any

from ductile.config.schema.orchestrator import ReasoningGymTask
from ductile.roles import Task
from ductile.tasks.strict_text import disarm
from ductile.tasks.task import TaskError, did_you_mean


class ReasoningGym(Task):
    """Procedural: example `i` is made when it is asked for, and is the same in every process.

    The text between `<answer>` and `</answer>` is scored where the policy writes these tags, else all that it says.
    The scorers read it as data, also those that would run it (`ductile.tasks.strict_text`).
    """

    def __init__(self, config: ReasoningGymTask) -> None:
        if "{question}" not in config.question_template:
            raise TaskError(
                f'question_template is "{config.question_template}": it must contain {{question}}, for the example'
            )
        self.name = config.name
        self._system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
        self._template = config.question_template
        self._dataset = _create(config.name, config.config, config.size, config.seed)

    def __len__(self) -> int:
        return len(self._dataset)

    def messages(self, example: int) -> list[dict[str, str]]:
        prompt = self._template.replace("{question}", self._dataset[example]["question"])
        return [*self._system, {"role": "user", "content": prompt}]

    def reward(self, example: int, completion: str) -> float:
        from reasoning_gym.utils import extract_answer

        return float(
            self._dataset.score_answer(extract_answer(completion) or completion.strip(), self._dataset[example])
        )


def _create(name: str, config: dict[str, Any], size: int, seed: int) -> Any:
    from reasoning_gym.factory import DATASETS  # here, as importing it takes two seconds

    disarm(sys.modules)
    if name not in DATASETS:
        raise TaskError(f'reasoning-gym has no data set "{name}"{did_you_mean(name, DATASETS)}')
    dataset_class, config_class = DATASETS[name]
    known = {field.name for field in fields(config_class)} - {"size", "seed"}
    for key in config:
        if key in ("size", "seed"):
            raise TaskError(f"write `{key}` beside `name`, not inside `config`")
        if key not in known:
            raise TaskError(f'the config of reasoning-gym\'s {name} has no "{key}"{did_you_mean(key, known)}')
    try:
        settings = config_class(**config, size=size, seed=seed)
        settings.validate()
        return dataset_class(config=settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise TaskError(f"reasoning-gym's {name} refuses its config {config}: {error}") from error
