"""A resolved config is a valid input, and means the same."""

import tomllib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ductile.config.reading.docs import ROOTS
from ductile.config.reading.dump import ASKED_ONCE, to_table, to_toml, write_resolved
from ductile.config.reading.fit import fit
from ductile.config.reading.parse import parse
from ductile.config.reading.provenance import Draft
from ductile.config.schema.run import RLConfig
from ductile.config.schema.secrets import SECRETS
from ductile.config.schema.section import OnDisk, Section
from tests.config.stories import furnish
from tests.nightly import examples

text = st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda word: word != "None")
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def sections(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    """Values that the section accepts: any of its keys, each with anything that it may be."""
    required: dict[str, Any] = {}
    optional: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        if name not in SECRETS | ASKED_ONCE:
            (required if info.is_required() else optional)[name] = values(info.annotation, info.metadata)
    return st.fixed_dictionaries(required, optional=optional)


def values(annotation: Any, marks: list[Any]) -> st.SearchStrategy[Any]:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values(inside[0], [*marks, *inside[1:]])
    if origin is Union or origin is types.UnionType:
        return st.one_of([values(option, marks) for option in inside])
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is list:
        fewest = max([mark.min_length for mark in marks if isinstance(mark, MinLen)], default=0)
        return st.lists(values(inside[0], []), min_size=fewest, max_size=3)
    if origin is dict:
        inner = json_value if inside[1] is object else values(inside[1], [])
        return st.dictionaries(text, inner, max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return st.deferred(lambda: sections(annotation).map(lambda table: _with_type(annotation, table)))
    if annotation in (int, float):
        return _numbers(annotation, marks)
    if annotation is str:
        if any(isinstance(mark, OnDisk) for mark in marks):
            return text.filter(lambda word: not set(word) & set("~$%"))  # these are read as a shell reads them
        shortest = max([mark.min_length for mark in marks if isinstance(mark, MinLen)], default=0)
        return text.filter(lambda word: len(word) >= shortest)
    return {bool: st.booleans(), type(None): st.none(), object: json_value}[annotation]


def _with_type(section: type[Section], table: dict[str, Any]) -> dict[str, Any]:
    """Pydantic chooses a variant by its `type`; ductile's own reading would fill in the default's."""
    info = section.model_fields.get("type")
    return table if info is None else {"type": get_args(info.annotation)[0], **table}


def _numbers(kind: type, marks: list[Any]) -> st.SearchStrategy[Any]:
    low = max([mark.ge for mark in marks if isinstance(mark, Ge)], default=None)
    above = max([mark.gt for mark in marks if isinstance(mark, Gt)], default=None)
    high = min([mark.le for mark in marks if isinstance(mark, Le)], default=None)
    below = min([mark.lt for mark in marks if isinstance(mark, Lt)], default=None)
    if kind is int:
        return st.integers(low if above is None else above + 1, high if below is None else below - 1)
    return st.floats(
        low if above is None else above,
        high if below is None else below,
        exclude_min=above is not None,
        exclude_max=below is not None,
        allow_nan=False,
        allow_infinity=False,
    )


@pytest.mark.parametrize(("command", "root"), [(command, root) for command, root, _ in ROOTS])
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_written_reads_back_equal(command: str, root: type[Section], data: st.DataObject) -> None:
    config = root.model_validate(data.draw(sections(root)))
    read_back = fit(root, Draft(tomllib.loads(to_toml(to_table(config)))))
    assert read_back.problems == []
    assert root.model_validate(read_back.values) == config


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--seq-len 512 --seed 3 --trainer.optim.max-norm None --wandb --bench",
        '--cluster.component-placement {"actor":0,"rollout":"1-2","inference":3} --trainer.loss.type grpo',
        '--orchestrator.task.config {"a":null,"b":[1,{"c":"None"}]} --orchestrator.sampling.stop a b',
        "--resume --trainer.scheduler.type cosine --trainer.scheduler.warmup-steps 1",
    ],
)
def test_a_resolved_run_is_the_same_run(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    config = parse(RLConfig, ["@", "good.toml", *flags.split()]).config
    Path("resolved.toml").write_text(to_toml(to_table(config)))
    again = parse(RLConfig, ["@", "resolved.toml"])
    assert again.config == config
    assert again.derived == ()  # everything is spelled out


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (
            '--cluster.component-placement {"actor":0,"rollout":"1-2"}',
            '--cluster.component-placement {"actor":"0-2","rollout":3}',
        ),
        ("--deployment.num-infer-gpus 2", "--deployment.num-train-gpus 3 --deployment.num-infer-gpus 1"),
    ],
)
def test_a_resolved_file_runs_on_other_slots(
    first: str, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    config = parse(RLConfig, ["@", "good.toml", *first.split()]).config
    write_resolved(config, "run", "rl")
    assert parse(RLConfig, ["@", "run/config.toml"]).config == config
    moved = parse(RLConfig, ["@", "run/config.toml", *then.split()]).config
    assert (moved.deployment.num_train_gpus, moved.inference.parallel.dp) == (3, 1)


@pytest.mark.parametrize(
    ("first", "then", "utilization"),
    [
        ("", "", 0.9),
        ("", "--cluster.auto-scheduler", 0.4),
        ("--cluster.auto-scheduler", "--cluster.auto-scheduler false", 0.9),
        ("--cluster.device cpu", "--cluster.device auto --cluster.auto-scheduler", 0.4),
        ("--inference.gpu-memory-utilization 0.9", "--cluster.auto-scheduler", 0.9),
        ("--inference.gpu-memory-utilization None", "--cluster.auto-scheduler", 0.4),
    ],
)
def test_a_resolved_file_keeps_the_memory_share_that_was_written_and_no_other(
    first: str, then: str, utilization: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    write_resolved(parse(RLConfig, ["@", "good.toml", *first.split()]).config, "run", "rl")
    again = parse(RLConfig, ["@", "run/config.toml", *then.split()]).config
    assert again.inference.gpu_memory_utilization == utilization


@pytest.mark.parametrize("flags", [["--resume"], ["--ckpt.resume-step", "3"]])
def test_a_resumed_run_leaves_a_file_that_begins_one(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `--clean` contradicts it, and running the file again as it is resumes."""
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    write_resolved(parse(RLConfig, ["@", "good.toml", *flags]).config, "run", "rl")
    again = parse(RLConfig, ["@", "run/config.toml", "--clean"]).config
    assert (again.resume, again.ckpt.resume_step, again.clean) == (False, None, True)


def test_secrets_and_what_is_asked_once_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    flags = ["--inference.server.api-key", "hush", "--clean", "--dry-run"]
    written = tomllib.loads(to_toml(to_table(parse(RLConfig, ["@", "good.toml", *flags]).config)))
    assert "hush" not in str(written)
    assert not written.keys() & {"clean", "dry_run"}
