"""A flag is stronger than any file: over each key of each command.

The dumb twin of a resolved config is the command line that it was made of: a flag beside the one means what it means
beside the other.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from annotated_types import Ge, Gt, Le, Lt

from ductile.config.reading.dump import to_table, write_resolved
from ductile.config.reading.errors import ConfigError, dotted, flag
from ductile.config.reading.flags import read
from ductile.config.reading.key_tree import Key, keys, value_at
from ductile.config.reading.parse import parse
from ductile.config.reading.provenance import Draft
from ductile.config.schema.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from tests.config.stories import furnish

TASK = ["--orchestrator.task.type", "jsonl", "--orchestrator.task.path", "data.jsonl"]
TASK += ["--orchestrator.task.reward", "reward.py:right", "--model.name", "model"]
BASES: dict[str, tuple[str, type[Section], list[str]]] = {
    "rl": ("rl", RLConfig, ["@", "good.toml"]),
    "rl, written out": (
        "rl",
        RLConfig,
        [
            *("@", "good.toml", "--seed", "3", "--seq-len", "512", "--orchestrator.sampling.max-tokens", "40"),
            *("--inference.seed", "4", "--orchestrator.sampling.stop", "a", "--orchestrator.eval.interval", "2"),
            *(
                "--trainer.scheduler.type",
                "linear",
                "--trainer.scheduler.warmup-steps",
                "1",
                "--wandb",
                "--tensorboard",
            ),
            *("--trainer.loss.type", "grpo", "--orchestrator.no-shuffle", "--trainer.optim.max-norm", "None"),
            *("--cluster.auto-scheduler", "--cluster.component-placement", '{"actor": 0, "rollout": "1-3"}'),
        ],
    ),
    "rl, a file of rows": ("rl", RLConfig, [*TASK, "--ckpt.interval", "2", "--orchestrator.eval.num-examples", "9"]),
    "rl, own code": (
        "rl",
        RLConfig,
        [
            *("--model.name", "model", "--orchestrator.task.type", "import", "--max-steps", "3"),
            *("--orchestrator.task.import-path", "reward.py:Task", "--orchestrator.task.kwargs", '{"a": 1}'),
            *("--trainer.loss.type", "custom", "--trainer.loss.import-path", "reward.py:right"),
        ],
    ),
    "sft": ("sft", SFTConfig, ["@", "sft.toml"]),
    "sft, written out": (
        "sft",
        SFTConfig,
        [
            "@",
            "sft.toml",
            "--data.seq-len",
            "64",
            "--optim.max-norm",
            "2",
            "--scheduler.type",
            "cosine",
            "--scheduler.warmup-steps",
            "1",
        ],
    ),
    "sft, fake data": ("sft", SFTConfig, ["--model.name", "model", "--bench", "--data.type", "fake"]),
    "trainer": ("trainer", TrainerRunConfig, ["--model.name", "model", "--data.fake", "--max-steps", "2"]),
    "orchestrator": (
        "orchestrator",
        OrchestratorRunConfig,
        [
            *("--model.name", "model", "--client.base-url", "http://localhost:8000/v1"),
            *("--task.type", "builtin", "--task.name", "addition"),
        ],
    ),
    "inference": ("inference", InferenceRunConfig, ["--model.name", "model", "--max-num-seqs", "8"]),
    "inference, bench": ("inference", InferenceRunConfig, ["--model.name", "model", "--bench"]),
}
FILES = {
    "path": "other.jsonl",
    "reward": "reward.py:other",
    "chat_template": "other.jinja",
    "import_path": "reward.py:Task",
}
WORDS = {
    "task.name": "reverse", "model.name": "other", "policy": "static", "base_url": "http://localhost:8001/v1",
    "component_placement": '{"actor": "0-1", "rollout": 2}', "reward_weights": "2.0", "layouts": "dp_shard=1",
    "api_key_var": "PATH", "api_key": "12345678", "host": "::1", "kwargs": '{"b": 2}',
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ductile.config.checks.written._inputs", lambda config: ())  # five sixths of the time
    furnish(tmp_path)
    Path("other").symlink_to("model")
    Path("other.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 99)
    Path("data.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 98)
    Path("other.jinja").write_text("{{ messages }}")
    Path("reward.py").write_text("def right(row, completion): ...\ndef other(row, completion): ...\nclass Task: ...\n")


def _leaves(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Key, Any]]:
    """Every key that holds a value, of each variant, with its field; and the optional tables."""
    for name, key in keys(section).items():
        here = (*path, name)
        if key.not_built and not key.not_built.only:
            continue
        if not key.variants or key.optional or key.is_union:
            yield here, key, section.model_fields[name]
        for variant in key.variants:
            yield from _leaves(variant, here)


def _words(path: tuple[str, ...], key: Key, info: Any, now: object) -> Iterator[list[str]]:
    """Ways to write the key as a flag, each another value than `now` where that can be."""
    at = flag(path)
    if key.optional:
        yield [at, "None"]
    if key.variants:
        for tag in key.tags if key.is_union else ():
            yield [f"{at}.type", tag]
        yield [at]
        return
    for end, word in WORDS.items():
        if dotted(path).endswith(end):
            yield [at, word]
    if path[-1] in FILES:
        yield [at, FILES[path[-1]]]
    for choice in key.choices:
        yield [at, str(choice)]
    if key.shape == "bool" or key.has_bool:
        yield from (
            [at],
            [f"--no-{at[2:]}"],
            ["--" + ".".join([*at[2:].split(".")[:-1], f"no-{at[2:].split('.')[-1]}"])],
        )
    marks = [mark for mark in info.metadata if isinstance(mark, Ge | Gt | Le | Lt)]
    least = max(
        [mark.ge if isinstance(mark, Ge) else mark.gt for mark in marks if isinstance(mark, Ge | Gt)], default=0
    )
    most = min(
        [mark.le if isinstance(mark, Le) else mark.lt for mark in marks if isinstance(mark, Le | Lt)], default=9e9
    )
    if isinstance(now, int | float) and not isinstance(now, bool):
        yield [at, str(now + 1)]
        yield [at, str(now // 2 if isinstance(now, int) else now / 2)]
    if "whole number" in key.wants or "a number" in key.wants:
        numbers = (least, least + 1, least + 2, least + 64, (least + min(most, 1)) / 2)
        yield from (
            [at, str(number)]
            for number in numbers
            if number <= most and (number == int(number) or "a number" in key.wants)
        )
    if "list of texts" in key.wants:
        yield from ([at, "x", "y"], [at, "[]"])
    elif "list of whole" in key.wants:
        yield [at, "7", "8"]
    elif key.shape == "dict":
        yield from ([at, '{"x": 1}'], [f"{at}.x", "2"])
    elif "text" in key.wants:
        yield [at, "else"]


def _read(root: type[Section], words: list[str]) -> Section | str:
    try:
        return parse(root, words).config
    except ConfigError as error:
        return ", ".join(sorted(problem.key for problem in error.problems))


def _with_words(table: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null."""
    return {
        name: "None" if value is None else _with_words(value) if isinstance(value, dict) else value
        for name, value in table.items()
    }


def _test(base: str, *, every: int) -> None:
    """every: 1 has all keys, with each of their words; n every n-th key, with the first word that changes something."""
    command, root, flags = BASES[base]
    Path("own.toml").write_text(tomli_w.dumps(_with_words(read(root, flags).draft.values)))
    own = ["@", "own.toml"]
    config = _read(root, own)
    assert isinstance(config, Section), config
    resolved = ["@", str(write_resolved(config, "resolved", command))]
    assert _read(root, resolved) == config
    draft, changed = Draft(to_table(config)), set[str]()
    leaves = list(_leaves(root))[::every]
    paths = {path for path, _, _ in leaves}
    for path, key, info in leaves:
        for words in _words(path, key, info, draft.get(path)):
            wanted, found = _read(root, [*own, *words]), _read(root, [*resolved, *words])
            assert found == wanted, words
            if isinstance(found, Section) and value_at(found, path) != value_at(config, path):
                changed.add(dotted(path))
                if every > 1:
                    break
    assert len(changed) > len(paths) / 3  # the others are of other variants, refused here, or need a second key


@pytest.mark.parametrize("base", ["rl, written out", "sft, written out", "trainer", "orchestrator", "inference"])
def test_a_flag_beside_a_resolved_config_means_what_it_means_beside_the_users_own(base: str) -> None:
    _test(base, every=5)


@pytest.mark.nightly
@pytest.mark.parametrize("base", BASES)
def test_every_value_of_a_flag_does(base: str) -> None:
    _test(base, every=1)
