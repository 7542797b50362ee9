"""`ductile fit @ run.toml --gpus 8 --gpu-memory 80GiB`: with which layout and knobs does a model train fastest there?

It reads a model's `config.json` and what a config says of training, and looks at every layout of so many GPUs and at
every knob that saves memory. Nothing is started; neither weights nor tasks need be there yet.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ductile.config.reading.command_line import path_argument, print_error, require_folder

if TYPE_CHECKING:
    from ductile.config.checks.trainer_layout import TrainingConfig
    from ductile.sim.fit import FitRequest

DONE, NOTHING_FITS, BAD_CONFIG = 0, 1, 2
SHOWN = 3
"""Fits that are printed."""
HOST_BYTES = 200 * 2**30
"""Host memory for each GPU: a machine of eight has often 2 TiB, of which others take a part."""
COMMANDS = ("rl", "sft", "trainer")
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(GiB|GB|MiB|TiB|G)?", re.IGNORECASE)
_UNITS = {"gib": 2**30, "g": 2**30, "gb": 10**9, "mib": 2**20, "tib": 2**40}


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    asked, others = _parser().parse_known_args(list(words))
    command, others = (others[0], others[1:]) if others[:1] and others[0] in COMMANDS else ("rl", others)
    if others and not others[0].startswith(("@", "-")):
        others = ["@", *others]
    # Help comes at once: what reckons is loaded when there is something to reckon with.
    from ductile.config.reading.errors import ConfigError
    from ductile.config.reading.parse import parse
    from ductile.config.schema.run import RLConfig, SFTConfig, TrainerRunConfig
    from ductile.sim.fit import FitRequest

    roots: dict[str, type[TrainingConfig]] = {"rl": RLConfig, "sft": SFTConfig, "trainer": TrainerRunConfig}
    try:
        if asked.json is not None:
            require_folder("--json", asked.json)
        config = parse(roots[command], others, writes=False, across=False).config
        device = (asked.gpus, asked.gpu_memory, asked.gpu, asked.host_memory)
        return _print_fits(FitRequest(config, *device, asked.tokens_per_s), asked)
    except ConfigError as error:
        from ductile.dashboard.printable import printable

        print(printable(f"ductile fit: {error}", keep="\n"), file=sys.stderr)
    except BrokenPipeError:  # of `| head`: no reader is left
        raise
    except (OSError, ValueError) as error:
        print_error("fit", error)
    return BAD_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ductile fit",
        usage="ductile fit [rl | sft | trainer] @ run.toml --gpus N --gpu-memory 80GiB [--key value ...]",
        description="Find the layouts and the memory-saving knobs with which a config's model trains fastest on GPUs.",
        epilog="Everything else is read as the command's own keys: --trainer.model.seq-len 32768",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=_number, required=True, metavar="N", help="GPUs to train on, a slot each")
    parser.add_argument("--gpu-memory", type=memory_bytes, required=True, metavar="80GiB", help="memory of each")
    parser.add_argument(
        "--host-memory", type=memory_bytes, default=HOST_BYTES, metavar="200GiB", help="host memory for each; 200GiB"
    )
    parser.add_argument("--gpu", default="H100", metavar="NAME", help='whose peak is reckoned with: "H100" by default')
    parser.add_argument(
        "--tokens-per-s", type=_speed, metavar="S", help="what one slot alone trains on, measured: instead of --gpu"
    )
    parser.add_argument("--show", type=_number, default=SHOWN, metavar="N", help=f"how many to print; {SHOWN}")
    parser.add_argument("--json", type=path_argument, metavar="F", help="write what fits to this file too")
    return parser


def memory_bytes(text: str) -> int:
    """Bytes that a word such as "80GiB", "80" (GiB) or "80GB" says, as argparse's `type=`."""
    found = _MEMORY.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory; write 80GiB (units: MiB, GiB, TiB, G, GB)")
    return int(float(found[1]) * _UNITS[(found[2] or "GiB").lower()])


def _print_fits(request: "FitRequest", asked: argparse.Namespace) -> int:
    from ductile.observe import write_json
    from ductile.sim.fit import as_json, find_fits, table, toml, why_nothing_fits

    said = request.sentence
    fits = find_fits(request, request.host_memory)
    print(f"{said}\n", flush=True)
    if asked.json is not None:
        write_json(asked.json, {"fits": [as_json(fit, request) for fit in fits]})
    if not fits:
        print(f"Nothing fits. {why_nothing_fits(request)}")
        return NOTHING_FITS
    shown = fits[: asked.show]
    print(table(shown))
    for number, fit in enumerate(shown, 1):
        print(f"\n# {number}\n{toml(fit, request)}")
    more = f"{len(fits)} layouts fit. " if len(fits) > len(shown) else ""
    print(
        f"\n{more}Memory is counted by tensors, and times are predicted from data sheets: lay one over the config "
        "(`@ run.toml @ this.toml`), and `--bench` measures it."
    )
    return DONE


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= 4096):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 4096")
    return int(text)


def _speed(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return found
