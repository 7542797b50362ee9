"""The files in `results/`, and what they were measured on."""

import json
from pathlib import Path
from typing import Any

from wording import listed

RESULTS = Path(__file__).with_name("results")
ARMS = {
    "static": "the best split",
    "collocated": "collocated",
    "rules": "`rules`",
    "rules_policies": "`rules` with both options",
    "model": "`model`",
    "seed": "[dynamic.yaml](../examples/scheduling/dynamic.yaml)",
}
"""As the pages in `docs/` call them."""


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def where(*names: str) -> str:
    """ "2 cores (AMD EPYC 7B13)": what these files were measured on."""
    machines = dict.fromkeys((found["machine"]["cores"], found["machine"]["cpu"]) for found in map(result, names))
    return listed([f"{cores} core{'' if cores == 1 else 's'} ({cpu})" for cores, cpu in machines])
