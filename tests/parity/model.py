"""The models, the batches and the loss that parity is shown with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ductile.config.trainer import AdamWConfig, CustomLoss, TrainerConfig
from ductile.core.batch.loss_aggregation import loss_denominator
from ductile.core.batch.packing import pack
from ductile.core.layout.parallel_layout import ParallelLayout
from ductile.records import MicroBatch, Sample
from tests.parity.meshes import NUM_LAYERS
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

MODELS = ("qwen3", "llama")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 36, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 44},
    "llama": {"hidden_size": 32, "num_key_value_heads": 2, "intermediate_size": 40, "tie_word_embeddings": False},
}
"""Qwen3 has tied embeddings, norms of queries and keys, and sizes that few numbers divide: 36 rows are no eight equal
chunks, 44 no eight equal columns, 102 words no four equal parts."""
OPTIM = AdamWConfig(lr=3e-4, eps=1e-5)
"""Adam's first update is the sign of the gradient, and one sign in 30,000 that rounding turns would be 4 thousandths of
all that three steps change. With this eps a gradient that is next to nothing changes next to nothing."""
COLLECTIVE_TIMEOUT_S = 20

Memory = Literal["shadow", "streaming"]
"""How a resize uses memory (`trainer.resize.memory`)."""


def make_folders(root: Path) -> dict[str, Path]:
    shared = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8}
    return {model: make_model_folder(root / model, model, **shared, **SHAPES[model]) for model in MODELS}


def settings_for(folder: Path, model: Mapping[str, str], memory: Memory = "shadow") -> dict[str, Any]:
    """A dumped `TrainerConfig`; `model` has keys of [trainer.model]. Sizes of axes are not among them: a trainer is
    given its layout."""
    sections = {
        "model": {"name": str(folder), **model},
        "resize": {"memory": memory},
        "loss": CustomLoss(import_path="tests.parity.recorded.recording_loss", needs_reference=True),
        "optim": OPTIM,
        "dist_timeout_seconds": COLLECTIVE_TIMEOUT_S,
    }
    return TrainerConfig.model_validate(sections).model_dump()


SEQ_LEN = 64
"""Most tokens of a micro-batch."""
MANY, FEW = (31, 7, 18, 44, 12, 25, 9, 16, 21, 13), (28, 5)
"""Lengths of the samples of two chunks of a batch, in tokens. Of the second chunk most ranks of a large mesh have
none."""
SIBLINGS = ((0, 2, 5), (3, 8))
"""Samples of the first chunk that are completions of one prompt."""
PROMPT_LEN = 6


@dataclass(frozen=True)
class TrainingBatch:
    """What one optimizer step is taken on, in chunks, as a loop gives them to its trainer. The last one is empty."""

    chunks: tuple[tuple[Sample, ...], ...]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for chunk in self.chunks for sample in chunk)

    @property
    def loss_denominator(self) -> float:
        return loss_denominator(self.samples)


def make_batch(seed: int) -> TrainingBatch:
    many = make_samples(MANY, seed=2 * seed, temperatures=(1.0, 0.7, 1.3))
    for first, *others in SIBLINGS:
        prompt = many[first].token_ids[:PROMPT_LEN]
        for index in (first, *others):
            many[index] = _after_prompt(many[index], prompt)
    few = make_samples(FEW, seed=2 * seed + 1, temperatures=(0.7,))
    return TrainingBatch((tuple(many), tuple(few), ()))


def micro_steps(samples: Sequence[Sample], layout: ParallelLayout) -> list[tuple[MicroBatch, ...]]:
    """The micro-batches of each data-parallel rank, as the trainer's client packs them; without samples one that is
    empty on every rank."""
    packed = pack(samples, layout.num_data_parallel, SEQ_LEN)
    return [tuple(mine) or (MicroBatch(()),) for mine in packed]


def _after_prompt(sample: Sample, prompt: Sequence[int]) -> Sample:
    """The sample with this prompt, of which no token is trained on, and the token after it is: the prompt ends here."""
    length = len(prompt)
    mask = [False] * length + [True] + list(sample.loss_mask[length + 1 :])
    return replace(sample, token_ids=(*prompt, *sample.token_ids[length:]), loss_mask=mask)
