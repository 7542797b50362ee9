"""Tokens per second of the engine, and of `transformers.generate` where that is installed.

Both run random models of one shape in one dtype on the same prompts, greedily, with the same output lengths, as uneven
as RL's. Which tokens come does not matter: every sequence has a length that is given. `transformers` gets static
batches in order of arrival, left-padded, each until its longest completion is done. Both do without cuDNN's attention,
which makes a plan for each new length. The engine runs three times: as it comes, which is by CUDA graphs on a GPU, by
graphs that read the cache where it lies, and without any.
"""

import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ductile.config.schema.inference import InferenceConfig
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.paged_attention import without_cudnn
from ductile.generator.generate_role import resolve_dtype
from ductile.kernels.device import peak_memory
from ductile.model.checkpoint import empty_model, read_spec
from ductile.records import GenerateRequest, Sampling
from gpu_parts.models import make_folder, shape_of
from gpu_parts.part import Setting

WAYS: dict[str, dict[str, Any]] = {
    "ductile": {},
    "ductile_in_place": {"block_size": 256},
    "ductile_eager": {"model": {"enforce_eager": True}},
}
"""Settings of the engine's runs, beside those of `make_engine`."""
PEER_S = 45.0
"""No further batch size of the peer's is begun when the ones before took longer than this together."""


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    shortest_prompt: int
    longest_prompt: int
    median: int
    """Of the output lengths, which are log-normal."""
    longest: int
    batches: tuple[int, ...]
    """The peer's."""


FULL = Load(requests=128, shortest_prompt=128, longest_prompt=512, median=128, longest=384, batches=(128, 64))
SMALL = Load(requests=6, shortest_prompt=4, longest_prompt=12, median=6, longest=12, batches=(6,))


def run(setting: Setting) -> dict[str, Any]:
    load, device = (SMALL if setting.small else FULL), "cuda:0" if setting.device == "cuda" else "cpu"
    dtype = resolve_dtype("auto", device)
    shape = shape_of("0.6B", setting)
    prompts, lengths = requests(load, shape["vocab_size"])
    num_tokens = sum(lengths)
    speeds = {
        f"tokens_per_s_{way}": num_tokens / engine_seconds(load, shape, prompts, lengths, device, dtype, settings)
        for way, settings in WAYS.items()
    }
    figures: dict[str, Any] = {
        "model": "0.6B",
        "dtype": str(dtype).removeprefix("torch."),
        "requests": len(prompts),
        "output_tokens": num_tokens,
        **speeds,
        "peak_memory_gib": peak_memory(device).used_bytes / 2**30,
        "tokens_per_s_transformers": None,
    }
    if find_spec("transformers") is None:
        figures["no_peer"] = "transformers is not installed"
    else:
        figures |= peer_figures(load, shape, prompts, lengths, device, dtype)
    peer = figures["tokens_per_s_transformers"]
    figures["ratio_vs_transformers"] = figures["tokens_per_s_ductile"] / peer if peer else None
    against = f"{figures['ratio_vs_transformers']:.2f} times transformers" if peer else figures["no_peer"]
    ours, in_place, eager = (f"{speed:,.0f}" for speed in speeds.values())
    sentence = f"{ours} tokens/s, {against}; in place {in_place}, without graphs {eager}"
    return figures | {"sentence": sentence}


def requests(load: Load, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    draw = random.Random(0)
    prompts = [
        [draw.randrange(1, vocab_size) for _ in range(draw.randint(load.shortest_prompt, load.longest_prompt))]
        for _ in range(load.requests)
    ]
    lengths = [min(load.longest, max(4, round(draw.lognormvariate(math.log(load.median), 1.0)))) for _ in prompts]
    return prompts, lengths


def timed(device: str, work: Callable[[int], Any]) -> float:
    """Of all requests, once the first four have warmed everything up."""
    work(4)
    start = now(device)
    work(10**9)
    return now(device) - start


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def engine_seconds(
    load: Load,
    shape: dict[str, Any],
    prompts: list[list[int]],
    lengths: list[int],
    device: str,
    dtype: torch.dtype,
    settings: dict[str, Any],
) -> float:
    """Its memory is free again afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(make_folder(Path(folder) / "model", shape), load, device, dtype, settings)

    def work(few: int) -> None:
        run_engine(engine, prompts[:few], [4] * few if few < len(prompts) else lengths)

    return timed(device, work)


def make_engine(folder: Path, load: Load, device: str, dtype: torch.dtype, settings: dict[str, Any]) -> Engine:
    model = empty_model(read_spec(folder), dtype, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    config = InferenceConfig.model_validate(
        {
            **settings,
            "model": {"max_model_len": load.longest_prompt + load.longest, **settings.get("model", {})},
            "max_num_seqs": load.requests,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
        }
    )
    return Engine(model, config, eos_token_ids=(), decode=lambda tokens, skip_special_tokens: "", device=device)


def run_engine(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> None:
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = Sampling(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.add(GenerateRequest(str(i), tuple(prompt), sampling))
    num_tokens = 0
    while engine.has_work():
        num_tokens += sum(len(generation.token_ids) for generation in engine.step())
    if num_tokens != sum(lengths):
        raise RuntimeError(f"{num_tokens} tokens came, and {sum(lengths)} were asked for")


def peer_figures(
    load: Load, shape: dict[str, Any], prompts: list[list[int]], lengths: list[int], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Its own failure, whatever it is, costs the peer's figures alone, and not those of batch sizes before it."""
    speeds, failure = dict[str, float](), ""
    try:
        model = make_peer(shape, device, dtype)
        began_s = time.monotonic()
        for batch in load.batches:
            if time.monotonic() - began_s < PEER_S:

                def work(few: int, batch: int = batch) -> None:
                    run_peer(model, prompts[:few], [4] * few if few < len(prompts) else lengths, batch, device)

                speeds[str(batch)] = sum(lengths) / timed(device, work)
    except Exception as error:
        failure = f"transformers failed: {type(error).__name__}: {error}"[:300]
    if not speeds:
        return {"no_peer": failure}
    import transformers

    found = {"tokens_per_s_transformers": max(speeds.values()), "by_batch_size": speeds}
    return found | {"transformers": transformers.__version__} | ({"peer_failed": failure} if failure else {})


def make_peer(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    keys = shape.keys() - {"architectures", "model_type", "rope_theta"}
    config = transformers.Qwen3Config(**{key: shape[key] for key in keys})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return model.to(device).eval()


@torch.inference_mode()
@without_cudnn()
def run_peer(model: Any, prompts: list[list[int]], lengths: list[int], batch: int, device: str) -> None:
    for first in range(0, len(prompts), batch):
        members = prompts[first : first + batch]
        width, longest = max(map(len, members)), max(lengths[first : first + batch])
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in members], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in members], device=device)
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            min_new_tokens=longest,
            max_new_tokens=longest,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
