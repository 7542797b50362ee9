"""python -m tests.lm_eval PYTHON: a server measured by lm-eval against what lm-eval's own `hf` model says.

PYTHON has lm-eval (`make lm-eval-test` makes it one). Both measure SmolLM2-135M-Instruct in fp32: the server by
`local-completions`, with the requests that any user's lm-eval sends. Prints a table, and ends with "N passed" and the
exit code 0 when

    accuracy        is the same over the multiple-choice rows
    log-likelihood  of each choice is the same within 1e-3, and so is whether it is the greedy one
    text            of each generation is the same
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lm_eval.tasks import CHOICES, NUM_CHOICES, NUM_TEXTS, TEXTS, write_tasks

ROOT = Path(__file__).parents[2]
MAX_DIFFERENCE = 1e-3
MEASURE_TIMEOUT_S = 1200
STOP_TIMEOUT_S = 60
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

Row = tuple[str, int, str, bool]
"""What is compared, in how many cases, what was found, and whether that is right."""


def main(python: str) -> int:
    began_s = time.monotonic()
    model = _model_folder()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_tasks(folder)
        theirs = _measure(python, folder, "hf", f"pretrained={model},dtype=float32", "--device", "cpu")
        with _server(model) as url:
            arguments = f"model={model},base_url={url}/v1/completions,num_concurrent=8,max_retries=1"
            ours = _measure(python, folder, "local-completions", arguments)
    rows = [*_compared_choices(ours[CHOICES], theirs[CHOICES]), _compared_texts(ours[TEXTS], theirs[TEXTS])]
    print(f"\n{'local-completions against hf':32} {'of':>5}  found")
    for what, number, found, right in rows:
        print(f"{what:32} {number:>5}  {found}{'' if right else '   FAILED'}")
    failed = sum(not right for *_, right in rows)
    print(f"\n{time.monotonic() - began_s:.0f} s")
    print((f"{failed} failed, " if failed else "") + f"{len(rows) - failed} passed")
    return int(failed > 0)


def _model_folder() -> Path:
    script = [sys.executable, str(ROOT / "examples" / "smollm2" / "make_model.py")]
    return Path(subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


@contextmanager
def _server(model: Path) -> Iterator[str]:
    """A server of the model, and its URL."""
    command = [sys.executable, "-m", "ductile", "inference", "--model.name", str(model), "--server.port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next((line.split()[-1] for line in process.stdout if line.startswith("serving ")), None)
        if url is None:
            raise SystemExit("the server did not start")
        yield url
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _measure(python: str, folder: Path, model: str, arguments: str, *flags: str) -> dict[str, list[Any]]:
    """Run lm-eval, and return its samples by task, in the order of the rows."""
    output = folder / model
    words = ["run", "--model", model, "--model_args", arguments, "--tasks", CHOICES, TEXTS, "--include_path", folder]
    words += ["--output_path", output, "--log_samples", *flags]
    command = [python, "-m", "lm_eval", *map(str, words)]
    subprocess.run(command, check=True, env=ENVIRONMENT, cwd=folder, timeout=MEASURE_TIMEOUT_S)
    samples: dict[str, list[Any]] = {}
    for task in (CHOICES, TEXTS):
        (path,) = output.rglob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().split("\n") if line]
        samples[task] = sorted(rows, key=lambda row: row["doc_id"])
    return samples


def _compared_choices(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[Row]:
    accuracy = [sum(row["acc"] for row in rows) / len(rows) for rows in (ours, theirs)]
    right = accuracy[0] == accuracy[1] and len(ours) == NUM_CHOICES
    yield "accuracy", len(ours), "{:.4f} and {:.4f}".format(*accuracy), right
    pairs = [
        pair
        for row, other in zip(ours, theirs, strict=True)
        for pair in zip(row["filtered_resps"], other["filtered_resps"], strict=True)
    ]
    worst = max(abs(float(mine[0]) - float(yours[0])) for mine, yours in pairs)
    yield "log-likelihoods", len(pairs), f"worst difference {worst:.1e}", worst <= MAX_DIFFERENCE
    same = sum(str(mine[1]) == str(yours[1]) for mine, yours in pairs)
    yield "whether a choice is the greedy one", len(pairs), f"{same} equal", same == len(pairs)


def _compared_texts(ours: Sequence[Any], theirs: Sequence[Any]) -> Row:
    pairs = [(row["resps"][0][0], other["resps"][0][0]) for row, other in zip(ours, theirs, strict=True)]
    same = sum(mine == yours for mine, yours in pairs)
    for mine, yours in [pair for pair in pairs if pair[0] != pair[1]][:3]:
        print(f"ours {mine!r}\nhf   {yours!r}")
    return "generations", len(pairs), f"{same} equal", same == len(pairs) == NUM_TEXTS


if __name__ == "__main__":
    sys.exit(main(str(Path(sys.argv[1]).absolute())))
