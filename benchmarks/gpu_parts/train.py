"""A training step of one slot: MFU and memory.

The trainer works on a micro-batch of 16k tokens, forward, backward and optimizer step, with bf16 compute, fp32 masters
and AdamW: once on documents of 2,048 tokens, once on prompts with eight completions each, which share their prompt.
When the memory does not hold that, on half as many tokens, and when it does not hold those, on a quarter, in shorter
documents. The operations are those of the model's spec (`ductile.core.layout.model.flops`), the time is that of the
whole step.
"""

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.model.peak import Peak, arithmetic_of, compute_dtype
from ductile.core.layout.model.spec import ModelSpec
from ductile.fabric.groups import Groups
from ductile.kernels.device import name_of, peak_memory, peak_of
from ductile.model.packed import PackedSamples
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import MicroBatch, Sample
from ductile.trainer.state import StatePlans
from ductile.trainer.trainer import Trainer, spec_of
from gpu_parts.models import make_folder, shape_of
from gpu_parts.part import Setting

NUM_TOKENS = 16_384
SMALL_TOKENS = 128
GROUP_SIZE = 8
WARM_UP, STEPS = 2, 3


def run(setting: Setting, shape: str) -> dict[str, Any]:
    num_tokens = SMALL_TOKENS if setting.small else NUM_TOKENS
    device = "cuda:0" if setting.device == "cuda" else "cpu"
    groups = Groups(0, 0, device, HashStore(), 60.0)
    with tempfile.TemporaryDirectory() as folder:
        model = make_folder(Path(folder) / "model", shape_of(shape, setting))
        found, too_many = that_fits(lambda num_tokens: measured(groups, str(model), device, num_tokens), num_tokens)
    rows, spec, peak, memory = found.rows, found.spec, found.peak, peak_memory(device)
    best = max(rows.values(), key=lambda row: row["mfu"])
    return {
        "model": shape,
        "num_parameters": spec.num_parameters,
        "tokens_a_micro_batch": found.num_tokens,
        "too_many_tokens_for_the_memory": too_many,
        "rows": rows,
        "attention": found.attention,
        "device": name_of(device),
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "peak_memory_gib": memory.used_bytes / 2**30,
        "reserved_gib": None if memory.reserved_bytes is None else memory.reserved_bytes / 2**30,
        "sentence": (
            f"{spec.num_parameters / 1e9:.2g} B parameters, {found.num_tokens:,} tokens: MFU {best['mfu']:.1%}, "
            f"{best['tokens_per_s']:,.0f} tokens/s, {memory.used_bytes / 2**30:.1f} GiB"
        ),
    }


@dataclass(frozen=True, slots=True)
class TrainFigures:
    num_tokens: int
    """Of a micro-batch."""
    rows: dict[str, dict[str, float]]
    spec: ModelSpec
    peak: Peak
    attention: str
    """What the model's layers chose."""


def that_fits(measure: Callable[[int], TrainFigures], num_tokens: int) -> tuple[TrainFigures, list[int]]:
    """What is measured with so many tokens, or half, or a quarter as many where the memory does not hold more; and with
    how many it did not. What those tries took of the memory does not count for the one that succeeds."""
    too_many: list[int] = []
    while True:
        try:
            return measure(num_tokens), too_many
        except torch.OutOfMemoryError:
            if len(too_many) == 2:
                raise
            too_many.append(num_tokens)
        num_tokens //= 2
        gc.collect()  # the trainer that failed
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measured(groups: Groups, model: str, device: str, num_tokens: int) -> TrainFigures:
    config = TrainerConfig.model_validate({"model": {"name": model, "seq_len": num_tokens}, "loss": {"type": "grpo"}})
    arithmetic = arithmetic_of(compute_dtype(None, device), config.matmul_precision, device)
    peak = peak_of(device, arithmetic, measure=True)
    assert peak is not None, "the device has no room to be measured in"
    spec = spec_of(config)
    trainer = Trainer(config, ParallelContext(groups, ParallelLayout.of((0,))), device, random_state(config, device))
    work = {
        "documents": documents(num_tokens, spec.vocab_size),
        "answers": completions(num_tokens, spec.vocab_size),
    }
    attention: set[str] = set()
    trainer.model.register_forward_hook(lambda model, inputs, outputs: attention.add(inputs[2].choice))
    rows = {name: measure(trainer, MicroBatch(tuple(samples)), peak) for name, samples in work.items()}
    return TrainFigures(num_tokens, rows, spec, peak, ", ".join(sorted(attention)))


def random_state(config: TrainerConfig, device: str) -> dict[str, torch.Tensor]:
    """Parameters and moments made on the device: numbers drawn on a CPU would take longer than all else."""
    buffers: dict[str, torch.Tensor] = {}
    layout = StatePlans(spec_of(config), config).layout(ParallelLayout.of((0,)), with_gradient=False)
    for name, (_, size) in layout.buffer_sizes(0).items():
        buffers[name] = torch.zeros(size, device=device)
        if name.startswith("model/"):
            if name.endswith("norm.weight"):
                buffers[name].fill_(1.0)
            else:
                buffers[name].normal_(0.0, 0.02)
    return buffers


def documents(num_tokens: int, vocab_size: int) -> list[Sample]:
    """Eight, and all their tokens are trained."""
    length = num_tokens // 8
    return [sample(0, length, vocab_size, seed) for seed in range(8)]


def completions(num_tokens: int, vocab_size: int) -> list[Sample]:
    """Eight to each of two prompts of a sixteenth of the tokens; `num_tokens` are run."""
    prompt = num_tokens // 16
    completion = (num_tokens // 2 - prompt) // GROUP_SIZE
    return [
        sample(prompt, completion, vocab_size, seed, prompt_seed=seed // GROUP_SIZE) for seed in range(2 * GROUP_SIZE)
    ]


def sample(num_prompt: int, num_completion: int, vocab_size: int, seed: int, prompt_seed: int = 0) -> Sample:
    ours, theirs = random.Random(seed), random.Random(f"prompt {prompt_seed}")
    tokens = [theirs.randrange(vocab_size) for _ in range(num_prompt)]
    tokens += [ours.randrange(vocab_size) for _ in range(num_completion)]
    mask = tuple(at >= max(1, num_prompt) for at in range(len(tokens)))
    advantage = 1.0 if seed % 2 else -1.0
    return Sample(
        tuple(tokens),
        mask,
        rollout_logprobs=tuple(-12.0 if trained else 0.0 for trained in mask),
        advantages=tuple(advantage if trained else 0.0 for trained in mask),
    )


def measure(trainer: Trainer, micro_batch: MicroBatch, peak: Peak) -> dict[str, float]:
    forward_backward_s, step_s, flops, num_trained = [], [], 0.0, 0
    for number in range(WARM_UP + STEPS):
        start = now(trainer.device)
        num_trained = trainer.forward_backward([micro_batch])
        between = now(trainer.device)
        report = trainer.optim_step(float(num_trained))
        end = now(trainer.device)
        flops = report.flops
        if number >= WARM_UP:
            forward_backward_s.append(between - start)
            step_s.append(end - start)
    seconds, num_run = statistics.median(step_s), PackedSamples.of(micro_batch.samples).work.num_tokens
    return {
        "mfu": flops / (seconds * peak.flops_per_s),
        "mfu_forward_backward": flops / (statistics.median(forward_backward_s) * peak.flops_per_s),
        "step_s": seconds,
        "forward_backward_s": statistics.median(forward_backward_s),
        "flops": flops,
        "tokens_run": num_run,
        "tokens_trained": num_trained,
        "tokens_per_s": num_run / seconds,
    }


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
