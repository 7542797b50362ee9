"""One GPU, used once, in less than 9 minutes: a short benchmark of each part of the product, and the tests for it.

    python benchmarks/gpu.py                           where there is a GPU; elsewhere it says what it would do
    python benchmarks/gpu.py --device cpu --small      the same code on a CPU, with tiny models
    python benchmarks/gpu.py --parts train_4b reshard

It needs no network, no compiler and nothing installed but torch and what ductile imports; `PYTHONPATH=src` is enough.
Only the part `tests` needs pytest and hypothesis, and is skipped where they are missing. Each part runs in a process of
its own with a deadline of its own, so that none is touched by another's failure. The JSON has each part's figures, or
why there are none, and is written after each part: whoever ends all this early has what was done. The exit code is 1
when a part has failed, when the time was over before a part's turn, and when there is a GPU that torch cannot use.
"""

import argparse
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gpu_parts.part import Failed, Setting, Skipped
from gpu_parts.tests import NEEDED
from provenance import RESULTS, provenance, results_file

ROOT = Path(__file__).parents[1]
FILES = (RESULTS / "gpu").relative_to(ROOT)
BUDGET_S = 520.0
"""Of all parts together, and of finding the device: 20 s are left of the 9 minutes to end in."""
DRIVER = Path("/dev/nvidiactl")
"""Is there wherever a process may use an NVIDIA GPU, whatever torch it has."""
SMALL_S = 120.0
"""Of each part with tiny models: whether it works, also on a busy machine."""
TAIL_CHARS = 3000
STACKS_S = 2.0
"""Before its deadline a part writes to its log where it is."""
KILL_S = 10.0
"""What is killed is gone by then, unless it hangs in the driver."""
NO_TURN = "its turn had not come"


@dataclass(frozen=True, slots=True)
class Part:
    runs: str
    """The module of `gpu_parts` whose `run` it is; behind a colon a further argument."""
    does: str
    deadline_s: float
    needs: tuple[str, ...] = ()
    """It is skipped where one of these packages is missing."""

    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


PARTS = {
    "tests": Part("tests", "runs the tests marked gpu", 185, NEEDED),
    "train_0.6b": Part(
        "train:0.6B", "trains a random model of Qwen3-0.6B's shape at 16k tokens a micro-batch: MFU, memory", 35
    ),
    "train_4b": Part(
        "train:4B", "trains a random model of Qwen3-4B's shape at 16k tokens a micro-batch: MFU, memory", 45
    ),
    "generate": Part(
        "generate", "generates with the engine, and with transformers where it is installed: tokens/s of each", 95
    ),
    "reshard": Part(
        "reshard", "reshards 1 GiB between four processes on the device with ductile.reshard: seconds, carrier", 35
    ),
    "resize": Part("resize", "resizes a live trainer over slots that share the device: its pauses", 50),
    "roles": Part("roles", "has a slot leave the trainer, generate, and come back, beside others: seconds, pauses", 40),
    "publish": Part(
        "publish", "publishes weights of Qwen3-0.6B's shape from a train slot to two generators: seconds", 35
    ),
}
"""In the order of their worth: what the budget does not reach has failed. Their deadlines add up to the budget."""
PROBE = Part("device", "says what the GPU is", 90)
"""Its time is that of the first import of torch on a cold machine."""


@dataclass(slots=True)
class Result:
    does: str
    outcome: Literal["done", "skipped", "failed"]
    reason: str = ""
    """Why it was skipped, or how it failed."""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    log_tail: str = ""
    """Of a part that failed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--small", action="store_true", help="tiny models and few repetitions")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help=f"default of all parts: the GPU's file in {FILES}")
    parser.add_argument("--logs", type=Path, help="a folder for the whole log of each part; its end is printed alone")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one part, in this process
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--deadline-s", type=float, default=SMALL_S, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_here(options.run, Setting(options.device, options.small, options.deadline_s), options.out)
        return
    sys.stdout.reconfigure(line_buffering=True)
    began_s = time.monotonic()
    device, why_not = find_device(options.device)
    results = {name: Result(PARTS[name].does, "failed", NO_TURN) for name in options.parts}
    file, origin = options.json or file_of(device, options.parts, options.small), provenance("torch")
    for name, result in run_all(options, device, why_not, began_s):
        results[name] = result
        if file:
            figures = {"device": device, "small": options.small, "seconds": time.monotonic() - began_s}
            write(file, figures | {"parts": {name: asdict(result) for name, result in results.items()}} | origin)
    failed = [name for name, result in results.items() if result.outcome == "failed"]
    seconds = time.monotonic() - began_s
    print(f"{len(results)} parts in {seconds:.0f} s" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if file:
        print(f"The figures are in {file}.")
    sys.exit(1 if failed else 0)


def write(file: Path, figures: dict[str, Any]) -> None:
    """Whole, or as it was before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(json.dumps(figures, indent=1) + "\n")
    beside.replace(file)


def file_of(device: dict[str, Any], parts: Collection[str], small: bool) -> Path | None:
    """Where figures go by themselves: those of all parts alone, so that a part's do not replace the others'."""
    if device.get("type") != "cuda" or small or set(parts) != set(PARTS):
        return None
    return results_file("gpu", device["name"], device["count"])


def find_device(asked: str) -> tuple[dict[str, Any], str]:
    """What there is, and why nothing can run on it; asked in another process, as this one keeps away from the GPU.

    Exits with 1 where there should be a GPU and none can be used."""
    if asked == "cpu":
        return {"type": "cpu"}, ""
    found = run_part(PROBE, "cuda", small=False)
    if found.outcome == "done":
        return found.figures, ""
    wrong = unusable(found, asked, DRIVER.exists())
    if wrong:
        sys.exit(f"{wrong}\n{found.log_tail}".rstrip())
    return {}, found.reason


def unusable(found: Result, asked: str, has_driver: bool) -> str:
    """What is wrong where no GPU was found; "" where there is none and none was asked for."""
    if asked == "cuda":
        return f"--device cuda: {found.reason}."
    if has_driver:
        another = "Another Python with `make gpu GPU_PYTHON=...` may have a torch that can use it"
        return f"There is a GPU ({DRIVER}), but {found.reason}. {another}; --device cpu --small needs no GPU."
    if found.outcome == "failed":
        return f"Whether there is a GPU is not known: {found.reason}. --device cpu --small needs no GPU."
    return ""


def run_all(
    options: argparse.Namespace, device: dict[str, Any], why_not: str, began_s: float
) -> Iterator[tuple[str, Result]]:
    if why_not:
        print(f"A dry run: {why_not}. With a GPU this would take less than {options.budget_s / 60:.0f} minutes:")
    else:
        print(f"On {device.get('name', device['type'])}:")
    for name in options.parts:
        part, left_s = PARTS[name], options.budget_s - (time.monotonic() - began_s)
        if why_not:
            result = Result(part.does, "skipped", why_not)
        elif left_s < 10:
            result = Result(part.does, "failed", f"the {options.budget_s:g} s of all parts were over (--budget-s)")
        else:
            log = options.logs and options.logs / f"{name}.log"
            result = run_part(part, device["type"], options.small, left_s, log)
        print(line(name, result, dry=bool(why_not)))
        if result.log_tail:
            print(result.log_tail)
        yield name, result


def line(name: str, result: Result, dry: bool) -> str:
    if dry:
        missing = PARTS[name].missing()
        skipped = f"; skipped, as {' and '.join(missing)} are missing for {sys.executable}" if missing else ""
        return f"  {name:12} {result.does}{skipped}"
    told = result.figures.get("sentence", "") if result.outcome == "done" else result.reason
    return f"  {name:12} {result.outcome:8} {result.seconds:5.0f} s  {told}"


def run_part(part: Part, device: str, small: bool, left_s: float = BUDGET_S, log_file: Path | None = None) -> Result:
    """In a process of its own, which is killed at the deadline with all that it started."""
    deadline_s, began_s = min(SMALL_S if small else part.deadline_s, left_s), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ductile-gpu-", ignore_cleanup_errors=True) as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--run", part.runs, "--device", device, "--out", str(out)]
        command += ["--deadline-s", str(deadline_s)]
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": folder}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, "--small"] if small else command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )
            ended = ends_in_time(process, deadline_s)
        result = Result(part.does, "failed")
        if not ended:
            result.reason = f"it was not done after {deadline_s:.3g} s"
        elif out.exists():
            result = Result(part.does, **json.loads(out.read_text()))
        else:
            result.reason = f"its process ended with {process.returncode}"
        if result.outcome == "failed":
            result.log_tail = log.read_text(errors="replace")[-TAIL_CHARS:]
        if log_file:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, log_file)
    result.seconds = time.monotonic() - began_s
    return result


def ends_in_time(process: "subprocess.Popen[bytes]", deadline_s: float) -> bool:
    """Whatever it leaves behind in its session is killed in any case; what hangs in the driver then is left there."""
    try:
        process.wait(deadline_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)


def run_here(runs: str, setting: Setting, out: Path) -> None:
    faulthandler.dump_traceback_later(max(setting.deadline_s - STACKS_S, setting.deadline_s / 2))
    try:
        module, _, shape = runs.partition(":")
        figures = import_module(f"gpu_parts.{module}").run(setting, *([shape] if shape else []))
        said = {"outcome": "done", "figures": figures}
    except Skipped as reason:
        said = {"outcome": "skipped", "reason": str(reason)}
    except Failed as failure:
        said = {"outcome": "failed", "reason": str(failure), "figures": failure.figures}
    except Exception as error:
        traceback.print_exc()
        said = {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"}
    out.write_text(json.dumps(said))


if __name__ == "__main__":
    main()
