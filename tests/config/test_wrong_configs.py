"""Wrong input is refused with words: `wrong_configs.txt` has the stories."""

from pathlib import Path

import pytest

from tests.config.stories import FILE, Story, read_stories, tell

STORIES = read_stories()


@pytest.mark.parametrize("story", STORIES, ids=[story.title for story in STORIES])
def test_says_what_is_wrong(story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, said = tell(story, tmp_path)
    assert said == story.said
    assert status == 2


def test_there_are_many_stories_and_none_is_told_twice() -> None:
    assert len(STORIES) >= 45
    assert len({story.command + str(story.files) for story in STORIES}) == len(STORIES), FILE
