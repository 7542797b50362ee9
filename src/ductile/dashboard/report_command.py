"""`ductile report runs/x`: the run as one HTML file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DONE, NO_REPORT = 0, 2


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="ductile report", description="Write a run down as one HTML file: who did what when, and what came of it."
    )
    parser.add_argument("run", nargs="?", metavar="FOLDER", help="the run's output_dir")
    parser.add_argument("--run", dest="named", metavar="FOLDER", help="the same")
    parser.add_argument("--output", type=Path, metavar="F", help="the file to write (default: FOLDER/report.html)")
    asked = parser.parse_args(list(words))
    if (asked.run is None) == (asked.named is None):
        parser.error("write the run's folder, once: ductile report runs/x")
    # Help answers at once: what reads and draws is loaded when there is something to draw.
    from ductile.dashboard.report import render
    from ductile.dashboard.story import NoStory, read_story
    from ductile.disk import write_whole

    folder = Path(asked.run or asked.named)
    file = asked.output or folder / "report.html"
    try:
        story = read_story(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, render(story))
    except (NoStory, OSError, ValueError) as error:
        sentence = str(error).rstrip(".")
        print(f"ductile report: {sentence[:1].upper()}{sentence[1:]}.", file=sys.stderr)
        return NO_REPORT
    for sentence in story.missing:
        print(f"Missing: {sentence}")
    print(f"Written: {file}")
    return DONE
