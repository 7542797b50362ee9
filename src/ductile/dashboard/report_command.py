"""`ductile report runs/x`: the run as one HTML file."""

import argparse
from collections.abc import Sequence

from ductile.config.reading.command_line import parse_with_folder, path_argument, print_error, require_folder

DONE, NO_REPORT = 0, 2


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="ductile report", description="Write a run down as one HTML file: who did what when, and what came of it."
    )
    parser.add_argument(
        "--output", type=path_argument, metavar="F", help="the file to write (default: FOLDER/report.html)"
    )
    asked = parse_with_folder(parser, words)
    # Help comes at once: what reads and draws is loaded when there is something to draw.
    from ductile.dashboard.report import render
    from ductile.dashboard.run_report import NoReport, read_run_report
    from ductile.disk import write_whole

    folder = asked.run
    file = asked.output or folder / "report.html"
    try:
        report = read_run_report(folder)
        require_folder("--output", file)
        write_whole(file, render(report))
    except (NoReport, OSError, ValueError) as error:
        print_error("report", error)
        return NO_REPORT
    for sentence in report.missing:
        print(f"Missing: {sentence}")
    print(f"Written: {file}")
    return DONE
