"""Puts what `quoted.py` makes of `results/` into README and docs, so that they quote nothing else.

    python benchmarks/figures.py             # says which pages are not as the results have it
    python benchmarks/figures.py --write     # makes them so

In a page the table NAME stands between `<!-- figures: NAME -->` and `<!-- end -->`.
"""

import argparse
import re
from pathlib import Path

from quoted import TABLES

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"<!-- figures: (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def refreshed(page: str) -> str:
    """The page with its tables as the results have them. Raises KeyError for a table that nobody makes."""
    return MARKED.sub(lambda found: f"<!-- figures: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="refresh the tables in the pages")
    asked = parser.parse_args()
    stale: list[Path] = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if (fresh := refreshed(page)) != page:
            stale.append(path)
            if asked.write:
                path.write_text(fresh, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'refreshed' if asked.write else 'not as the results have it (--write)'}")
    return 0 if asked.write or not stale else 1


if __name__ == "__main__":
    raise SystemExit(main())
