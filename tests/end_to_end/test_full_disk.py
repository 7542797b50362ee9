"""A disk that fills up under a run: the run says so, keeps what was saved, leaves no rubbish, and goes on later."""

import pytest

from tests.end_to_end.runs import checkpointed_steps, write_sft
from tests.full_disk import fill, small_disk


def names_the_full_disk(said: str) -> bool:
    return (
        "No space left on device" in said
        and " free" in said
        and "Traceback" not in said
        and max(map(len, said.splitlines())) < 600
    )


@pytest.mark.nightly
def test_a_disk_too_full_for_the_first_checkpoint(tmp_path, model, start):
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        config = write_sft(tmp_path, model, folder=disk / "run", train='"0-1"', interval=2, max_steps=4)
        fill(disk, leave_bytes=64 << 10)
        run = start(config, command="sft")
        assert run.ends(200) == 1, run.said()
        assert names_the_full_disk(run.said()), run.said()
        assert list((disk / "run/state").iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_no_checkpoint(tmp_path, model, start):
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        folder = disk / "run"
        config = write_sft(tmp_path, model, folder=folder, interval=2, max_steps=100)
        run = start(config, command="sft")
        run.until(lambda: checkpointed_steps(folder))
        ballast = fill(disk, leave_bytes=64 << 10)
        assert run.ends(200) == 1, run.said()
        assert names_the_full_disk(run.said()), run.said()
        saved = checkpointed_steps(folder)
        assert saved
        assert {path.name for path in (folder / "state").iterdir()} == {f"step_{step}" for step in saved}
        ballast.unlink()
        run = start(config, "--resume", "--max-steps", str(saved[-1] + 2), command="sft")
        assert run.ends(200) == 0, run.said()
        assert checkpointed_steps(folder)[-1] == saved[-1] + 2
