"""`ductile fit @ run.toml --gpus 8 --gpu-memory 80GiB`: with which layout and knobs does a model train fastest there?

It reads a model's `config.json` and what a config says of training, and looks at every layout of so many GPUs and at
every knob that saves memory. Nothing is started; neither weights nor tasks need be there yet.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ductile.config.reading.command_line import path_argument, print_error, require_folder

if TYPE_CHECKING:
    from ductile.config.checks.trainer_layout import TrainingConfig
    from ductile.core.layout.choice.memory_levers import Relief
    from ductile.core.layout.choice.slot_memory import SlotMemory
    from ductile.core.layout.model.spec import ModelSpec
    from ductile.core.scheduling.costs.layout_time import SlotSpeed
    from ductile.core.scheduling.layout_search import Fit

DONE, NOTHING_FITS, BAD_CONFIG = 0, 1, 2
SHOWN = 3
"""Fits that are printed."""
COMMANDS = ("rl", "sft", "trainer")
ASSUMED_SAMPLES = 64
"""Samples of an optimizer step where the config does not say how many."""
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(GiB|GB|MiB|TiB|G)?", re.IGNORECASE)
_UNITS = {"gib": 2**30, "g": 2**30, "gb": 10**9, "mib": 2**20, "tib": 2**40}


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="ductile fit",
        usage="ductile fit [rl | sft | trainer] @ run.toml --gpus N --gpu-memory 80GiB [--key value ...]",
        description="Find the layouts and the memory-saving knobs with which a config's model trains fastest on GPUs.",
        epilog="Everything else is read as the command's own keys: --trainer.model.seq-len 32768",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=_number, required=True, metavar="N", help="GPUs to train on, a slot each")
    parser.add_argument("--gpu-memory", type=memory_bytes, required=True, metavar="80GiB", help="memory of each")
    parser.add_argument("--gpu", default="H100", metavar="NAME", help='whose peak is reckoned with: "H100" by default')
    parser.add_argument(
        "--tokens-per-s", type=_speed, metavar="S", help="what one slot alone trains on, measured: instead of --gpu"
    )
    parser.add_argument("--show", type=_number, default=SHOWN, metavar="N", help=f"how many to print; {SHOWN}")
    parser.add_argument("--json", type=path_argument, metavar="F", help="write what fits to this file too")
    asked, others = parser.parse_known_args(list(words))
    command, others = (others[0], others[1:]) if others[:1] and others[0] in COMMANDS else ("rl", others)
    if others and not others[0].startswith(("@", "-")):
        others = ["@", *others]
    # Help comes at once: what reckons is loaded when there is something to reckon with.
    from ductile.config.reading.errors import ConfigError
    from ductile.config.reading.parse import parse
    from ductile.config.schema.run import RLConfig, SFTConfig, TrainerRunConfig

    roots: dict[str, type[TrainingConfig]] = {"rl": RLConfig, "sft": SFTConfig, "trainer": TrainerRunConfig}
    try:
        if asked.json is not None:
            require_folder("--json", asked.json)
        config = parse(roots[command], others, writes=False, across=False).config
        return _fit(config, asked)
    except ConfigError as error:
        from ductile.dashboard.printable import printable

        print(printable(f"ductile fit: {error}", keep="\n"), file=sys.stderr)
        return BAD_CONFIG
    except (OSError, ValueError) as error:
        print_error("fit", error)
        return BAD_CONFIG


def memory_bytes(text: str) -> int:
    """Bytes that a word such as "80GiB", "80" (GiB) or "80GB" says, as argparse's `type=`."""
    found = _MEMORY.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory; write 80GiB")
    return int(float(found[1]) * _UNITS[(found[2] or "GiB").lower()])


def _fit(config: "TrainingConfig", asked: argparse.Namespace) -> int:
    from ductile.config.checks.trainer_layout import asked_layout, built_keys, model_spec, num_samples, slot_memory
    from ductile.core.scheduling.layout_search import best_fits

    config = _on(config, asked.gpu_memory)
    spec, memory = model_spec(config), slot_memory(config)
    trainer, root = (config.trainer, "trainer.") if hasattr(config, "trainer") else (config, "")
    if spec is None:
        raise ValueError(_no_model(trainer.model.name))
    if memory is None:
        raise ValueError("what this optimizer keeps is not known; use adamw or sgd")
    sizes, samples = asked_layout(trainer.model), num_samples(config) or ASSUMED_SAMPLES
    speed = _speed_of(asked)
    print(_opening(spec, asked, sizes.seq_len, samples, speed))
    fits = best_fits(spec, asked.gpus, sizes, memory, samples, speed, built_keys())
    if not fits:
        print(f"\nNothing fits. {_least(spec, asked.gpus, memory, config, f'{root}model.')}")
        return NOTHING_FITS
    shown = fits[: asked.show]
    print(f"\n{_table(shown)}\n")
    for number, fit in enumerate(shown, 1):
        print(f"# {number}\n{_toml(fit, config, asked)}\n")
    more = f"{len(fits)} layouts fit. " if len(fits) > len(shown) else ""
    print(
        f"{more}Memory is counted by tensors and times are predictions from data sheets: lay one over the config "
        "(`@ this.toml`), and `--bench` measures it."
    )
    if asked.json is not None:
        from ductile.observe import write_json

        write_json(asked.json, {"fits": [_as_json(fit, config, asked) for fit in fits]})
    return DONE


def _no_model(name: str | None) -> str:
    """Why there is no model whose `config.json` could be read."""
    from ductile.config.checks.on_disk import model_findings

    if name is None:
        return "the config names no model: write --model.name models/my-model"
    (first, *_) = model_findings("model.name", name, needs_weights=False)
    return f"--model.name = {name} {first.what}"


def _on(config: "TrainingConfig", gpu_memory: int) -> "TrainingConfig":
    """The config on a device of so much memory."""
    cluster = config.cluster.model_copy(update={"device_memory_gib": gpu_memory / 2**30, "slots_per_device": 1})
    return config.model_copy(update={"cluster": cluster})


def _speed_of(asked: argparse.Namespace) -> "SlotSpeed":
    """Raises ValueError for a device that is not known."""
    from ductile.core.scheduling.costs.layout_time import SlotSpeed

    if asked.tokens_per_s is not None:
        return SlotSpeed(tokens_per_s=asked.tokens_per_s)
    found = SlotSpeed.of_device(asked.gpu)
    if found is None:
        raise ValueError(f"--gpu {asked.gpu}: its peak is not known; write H100, H200, A100 or --tokens-per-s")
    return found


def _opening(spec: "ModelSpec", asked: argparse.Namespace, seq_len: int, samples: int, speed: "SlotSpeed") -> str:
    from ductile.core.instances.placement import many

    whose = f"{speed.tokens_per_s:g} tokens/s a slot" if speed.tokens_per_s else asked.gpu
    return (
        f"{spec.num_parameters / 1e9:.3g}B parameters on {many(asked.gpus, 'GPU')} of {asked.gpu_memory / 2**30:.4g} GiB "
        f"({whose}): steps of {samples} samples of {seq_len:,} tokens"
    )


def _table(fits: Sequence["Fit"]) -> str:
    from ductile.core.layout.choice.layout_text import in_words
    from ductile.core.layout.memory.parts import gib

    rows = [f"{'':4}{'step':>10}{'GiB':>8}{'host':>8}  {'layout':36}parts of the memory"]
    for number, fit in enumerate(fits, 1):
        device, host = fit.use.device, fit.use.host
        rows.append(
            f"{f'#{number}':4}{fit.time.step_s:>8.3g} s{gib(device.total):>8}{gib(host.total):>8}  "
            f"{in_words(fit.dims) or 'one slot':36}{device.in_words()}"
        )
    return "\n".join(rows)


def _toml(fit: "Fit", config: "TrainingConfig", asked: argparse.Namespace) -> str:
    """What to lay over the config, so that it trains so."""
    from ductile.core.layout.choice.memory_levers import spelled

    is_rl = hasattr(config, "trainer")
    section = "trainer.model" if is_rl else "model"
    plain = {key: value for key, value in fit.settings.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in fit.settings.items() if isinstance(value, Mapping)}
    lines = ["[cluster]", f"device_memory_gib = {asked.gpu_memory / 2**30:.6g}", "", *_deployment(config, asked.gpus)]
    if plain:
        lines += ["", f"[{section}]", *(f"{key} = {spelled(value)}" for key, value in plain.items())]
    for key, table in tables.items():
        written: Mapping[str, Any] = table
        lines += ["", f"[{section}.{key}]", *(f"{name} = {spelled(value)}" for name, value in written.items())]
    return "\n".join(lines)


def _deployment(config: "TrainingConfig", gpus: int) -> list[str]:
    """Lines that give the trainer so many slots."""
    if config.cluster.component_placement is not None:
        return [f"# cluster.component_placement says who has which slots: give actor {gpus} of them"]
    deployment = config.deployment
    is_rl, generating = hasattr(config, "trainer"), getattr(deployment, "num_infer_gpus", 0)
    lines = ["[deployment]", f"{'num_train_gpus' if is_rl else 'num_gpus'} = {gpus}"]
    if gpus + generating > deployment.gpus_per_node:
        lines.append(f"gpus_per_node = {gpus + generating}")
    return lines


def _least(spec: "ModelSpec", gpus: int, memory: "SlotMemory", config: "TrainingConfig", root: str) -> str:
    """What a slot needs at least, and what would have to be."""
    from ductile.config.checks.trainer_layout import asked_layout, built_keys
    from ductile.core.layout.choice.memory_levers import in_words, relief
    from ductile.core.layout.choice.possible_layouts import possible_layouts
    from ductile.core.layout.memory.parts import gib

    trainer = config.trainer if hasattr(config, "trainer") else config
    sizes = asked_layout(trainer.model)
    least = min(possible_layouts(spec, gpus, sizes.cp_style, sizes.num_runs),
                key=lambda dims: memory.use(spec, dims, sizes).device.total)  # fmt: skip
    use = memory.use(spec, least, sizes).device
    found: list[Relief] = relief(spec, sizes, least, memory, built_keys())
    return (
        f"A slot would need at least {gib(use.total)} GiB ({use.in_words()}) and has {gib(memory.room_bytes)} GiB: "
        f"{in_words(found, memory, root)}."
    )


def _as_json(fit: "Fit", config: "TrainingConfig", asked: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "layout": asdict(fit.dims),
        "settings": dict(fit.settings),
        "step_s": fit.time.step_s,
        "time": asdict(fit.time),
        "device_bytes": fit.use.device.named(),
        "host_bytes": fit.use.host.named(),
        "moment": fit.use.moment,
        "toml": _toml(fit, config, asked),
    }


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _speed(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return found
