"""`ductile compare @ run.toml --prompts FILE`: do the generator and the trainer's forward pass say the same?"""

import argparse
from collections.abc import Sequence

from ductile.config.reading.command_line import path_argument


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="ductile compare",
        usage="ductile compare @ run.toml --prompts FILE [--decode N] [--worst N] [--json F] [--key value ...]",
        description="Compare log-probs of generator and scorer, over the whole vocabulary at each place of prompts.",
        epilog="Exit status: 0 where they agree, 1 where they differ by more than numerics explain, 2 where they could "
        "not be compared.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--prompts", type=path_argument, metavar="FILE", required=True,
        help='JSON objects, one a line, as {"prompt": "..."}, {"messages": [...]} or {"text": "..."}',
    )  # fmt: skip
    parser.add_argument("--decode", type=int, default=8, metavar="N", help="tokens to generate after each prompt (8)")
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="tokens to show (10)")
    parser.add_argument("--json", type=path_argument, metavar="F", help="write what was found to this file too")
    asked, rest = parser.parse_known_args(list(words))
    if asked.decode < 1 or asked.worst < 1:
        parser.error("--decode and --worst must be at least 1")
    from ductile.orchestrator.commands.model_comparison import compare  # its tokenizer takes a while to import

    return compare(rest, asked.prompts, asked.decode, asked.worst, asked.json)
