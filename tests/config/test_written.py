"""Nothing that is the user's is deleted or replaced: what `check` lets a run do in a folder, and what it does not."""

import os
from pathlib import Path

import pytest

from ductile.config.checks.on_disk import model_findings
from ductile.config.checks.written import DRY_RUN, WRITTEN, output_findings, place_findings
from ductile.config.reading.dump import write_resolved
from ductile.config.schema.bench import BenchConfig
from ductile.config.schema.run import RLConfig, SFTConfig
from ductile.orchestrator.ending.folder import run_folder
from tests.config.stories import furnish


def findings(tmp_path: Path, **changes) -> str:
    settings = {"output_dir": str(tmp_path / "run"), "model": {"name": str(tmp_path / "base")}} | changes
    return "; ".join(finding.what for finding in output_findings(SFTConfig.model_validate(settings)))


def test_the_docs_name_all_that_a_run_writes() -> None:
    page = Path(__file__).parents[2].joinpath("docs/loop.md").read_text()
    table = page.partition("## What is in runs/")[2].partition("\n\nA line is written")[0]
    assert [name for name in WRITTEN if f"`{name}`" not in table and f"`{name}/" not in table] == []


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.mark.parametrize("how", ["link to the model", "link to the run", "linked weights", "linked output", "dots"])
def test_links_are_followed(tmp_path, how):
    run = tmp_path / "run"
    with run_folder(str(run), clean=False):
        pass
    inside, base = run / "model", tmp_path / "base"
    match how:
        case "link to the model":  # what is deleted is a link, and the run would write to where it leads
            inside.symlink_to(model_in(base))
        case "link to the run":
            base.symlink_to(model_in(inside))
        case "linked weights":
            model_in(inside)
            base.mkdir()
            (base / "model.safetensors").symlink_to(inside / "model.safetensors")
        case "linked output":
            model_in(inside)
            (tmp_path / "other").symlink_to(run)
            base = tmp_path / "other/model"
        case _:
            base = model_in(inside).parent / "logs/../model"
    for flags in ({"clean": True}, {"resume": True}):
        assert "would be lost: this run" in findings(tmp_path, model={"name": str(base)}, **flags)


def test_what_lies_beside_is_fine(tmp_path, monkeypatch):
    base = model_in(tmp_path / "base")
    model_in(tmp_path / "run/models/base")
    for name in (base, tmp_path / "run", tmp_path / "run/models/base"):
        assert findings(tmp_path, model={"name": str(name)}) == ""
    monkeypatch.chdir(tmp_path)
    model_in(tmp_path / "model")
    assert "would be lost" not in findings(tmp_path, model={"name": "base"})


def test_a_benchmark_may_be_of_a_config_whose_run_is_there(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    assert "holds a run already" in findings(tmp_path)
    assert findings(tmp_path, bench={}) == findings(tmp_path, bench={}, clean=True) == ""
    assert "holds a run already" in findings(tmp_path, bench={}, dry_run=True)


def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path, monkeypatch):
    (tmp_path / "run/state").mkdir(parents=True)

    def fail(path):
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "iterdir", fail)
    assert findings(tmp_path) == f"cannot be looked into: Permission denied ({tmp_path / 'run/state'})"


def test_what_a_killed_writer_left_goes_at_the_next_start(tmp_path):
    for name in (".metrics.jsonl.partial", ".control.json.partial", ".notes.partial"):
        (tmp_path / name).write_text("half")
    with run_folder(str(tmp_path), clean=False):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".notes.partial", "logs"]


def test_all_that_clean_deletes_is_known_to_the_check(tmp_path):
    for name in WRITTEN:
        folder = tmp_path / name.strip(".") / "run"
        (folder / name).mkdir(parents=True)
        (folder / "events.jsonl").touch() if name != "events.jsonl" else None
        what = findings(tmp_path, output_dir=str(folder), model={"name": str(folder / name)}, clean=True)
        assert "would be lost" in what, name


def test_a_link_out_of_a_model_folder_is_refused_before_it_is_copied(tmp_path):
    furnish(tmp_path)
    (tmp_path / "secret").write_text("my password")
    (tmp_path / "model/LICENSE").symlink_to(tmp_path / "secret")
    (finding,) = model_findings("model.name", str(tmp_path / "model"))
    assert finding.what == (
        f"has LICENSE, a link to {tmp_path / 'secret'}, which would be copied into the models that are written. "
        "Put the file itself there, or take the link away"
    )


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_no_run_has_written_is_neither_deleted_nor_written_to(tmp_path, name, clean):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    assert str(tmp_path / "run" / name) in findings(tmp_path, clean=clean)


def test_every_file_of_a_list_is_looked_at(tmp_path):
    with run_folder(str(tmp_path / "run"), clean=False):
        pass
    (tmp_path / "run/logs").mkdir(exist_ok=True)
    (tmp_path / "run/logs/r.py").touch()
    task = {"type": "jsonl", "path": "rows.jsonl", "reward": ["math.sqrt", f"{tmp_path}/run/logs/r.py:f"]}
    config = RLConfig.model_validate({"output_dir": str(tmp_path / "run"), "orchestrator": {"task": task}})
    assert "would be lost" in "; ".join(finding.what for finding in output_findings(config))


@pytest.mark.parametrize("name", ["config.toml", DRY_RUN])
def test_a_config_beside_a_run_that_names_another_folder_is_refused(tmp_path, name):
    """As after `cp -r x y`, or when a relative output_dir is read in another folder."""
    x, y = tmp_path / "x", tmp_path / "y"
    config = SFTConfig.model_validate({"output_dir": str(x), "model": {"name": "base"}})
    for folder in (x, y):
        (folder / "state" / "step_2").mkdir(parents=True)
        write_resolved(config, folder, "sft", name)

    def said(config: SFTConfig, source: Path | str) -> str:
        return "; ".join(finding.what for finding in place_findings(config, str(source)))

    assert said(config, y / name) == (
        f"is another folder than {y}, where this file lies beside a run. To mean that one, write --output-dir {y}; "
        f"for the other, --output-dir {x}"
    )
    assert said(config, x / name) == said(config, "command line") == ""
    assert said(config.model_copy(update={"output_dir": str(tmp_path / "y/../x")}), x / name) == ""
    assert said(config.model_copy(update={"bench": BenchConfig()}), y / name) == ""
    (y / name).write_text("# by hand")
    assert said(config, y / name) == ""
    (y / "state" / "step_2").rmdir()
    write_resolved(config, y, "sft", name)
    assert said(config, y / name) == "", "there is no run"
