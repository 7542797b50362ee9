"""Compares a generator with the trainer's forward pass, over the whole vocabulary at each place of some prompts.

Run by `ductile compare` as `python -m ductile.generator.compare REQUEST`: reads a `Compare`, and writes a `Comparison`
or `NotCompared` to stdout, as JSON. Both models come from the folder that the config names. The generator computes as
it does for rollouts: prompts in chunks over its paged cache, then token after token; the scorer all at once.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ductile.columns import TokenIds
from ductile.config.checks.weight_headers import ModelFolderError
from ductile.config.schema.run import RLConfig
from ductile.core.layout.model.peak import arithmetic_of
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.logprob_report import LogprobReport
from ductile.generator.generate_role import load_engine
from ductile.kernels.dispatch import linear
from ductile.messages.comparison import Compare, ComparedToken, Comparison, NotCompared
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from ductile.model.logprobs import tokens_of_chunk
from ductile.model.transformer import Transformer
from ductile.parallel.parallelize import Precision
from ductile.records import GenerateRequest, Generation
from ductile.sampling import Sampling
from ductile.tasks.tokenizer import TokenizerError

NOTICED = 1e-3
"""Difference above which log-probs are counted."""


@dataclass(eq=False, slots=True)
class HiddenReport(LogprobReport):
    """The last hidden states of a prompt, as the engine computes them."""

    hidden: list[Tensor] = field(default_factory=list[Tensor])
    weight: Tensor | None = None
    """Output embeddings."""

    def score_prompt(self, prompt: Sequence[int], start: int, hidden: Tensor, weight: Tensor) -> None:
        known, self.weight = sum(map(len, self.hidden)), weight
        self.hidden.append(hidden[known - start : len(prompt) - start].clone())


@dataclass(slots=True)
class Found:
    """Differences so far."""

    num_worst: int
    count: int = 0
    num_over: int = 0
    num_positions: int = 0
    num_decoded: int = 0
    total: float = 0.0
    worst: list[ComparedToken] = field(default_factory=list[ComparedToken])

    def add(self, prompt: int, start: int, ours: Tensor, theirs: Tensor) -> None:
        """Log-probs [T, V] of both sides after token `start` of the prompt and those that follow it."""
        apart = (ours - theirs).abs().nan_to_num(torch.inf)
        self.count += apart.numel()
        self.num_positions += len(apart)
        self.num_over += int((apart > NOTICED).sum())
        self.total += float(apart.sum(dtype=torch.float64))
        values, tokens = apart.max(-1)
        for row in values.topk(min(self.num_worst, len(values))).indices.tolist():
            token = int(tokens[row])
            self._keep(
                ComparedToken(prompt, start + row + 1, token, float(ours[row, token]), float(theirs[row, token]))
            )

    def add_decoded(self, prompt: int, position: int, token: int, ours: float, theirs: float) -> None:
        compared = ComparedToken(prompt, position, token, ours, theirs, is_decoded=True)
        self.num_decoded += 1
        self._keep(compared)

    def _keep(self, compared: ComparedToken) -> None:
        self.worst.append(compared)
        self.worst = sorted(self.worst, key=lambda each: -each.difference)[: self.num_worst]


def compare(request: Compare) -> Comparison:
    """Raises ModelFolderError, TokenizerError or ValueError for a config or prompts that do not fit."""
    config = RLConfig.model_validate(request.config)
    device = _device(config)
    engine = load_engine(config.inference, device)
    model = config.trainer.model
    if model.name is None:
        raise ModelFolderError("trainer.model.name is not set; it must be a model folder")
    precision = Precision.of(model, device)
    scorer = load_model(model.name, dtype=precision.parameters, device=device, num_layers=model.debug.num_layers)
    scorer = scorer.to(precision.compute).requires_grad_(False).eval()
    if scorer.spec.vocab_size != engine.model.spec.vocab_size:
        raise ValueError(
            f"inference.model.name has {engine.model.spec.vocab_size} tokens in its vocabulary, and trainer.model.name "
            f"{scorer.spec.vocab_size}"
        )
    found = Found(request.num_worst)
    with torch.inference_mode():
        for number, prompt in enumerate(request.prompts, 1):
            _compare_prompt(number, prompt, request.num_decoded, engine, scorer, model.fp32_lm_head, found)
    dtypes = (precision.compute, next(engine.model.parameters()).dtype)
    exact = all(
        dtype == torch.float32 and arithmetic_of("float32", config.trainer.matmul_precision, device) == "float32"
        for dtype in dtypes
    )
    return Comparison(
        dtype="float32" if exact else "bfloat16",
        num_positions=found.num_positions,
        vocab_size=scorer.spec.vocab_size,
        num_decoded=found.num_decoded,
        largest=found.worst[0].difference,
        mean=found.total / max(1, found.count),
        share_over=found.num_over / max(1, found.count),
        worst=tuple(found.worst),
    )


def _compare_prompt(
    number: int,
    prompt: Sequence[int],
    num_decoded: int,
    engine: Engine,
    scorer: Transformer,
    fp32_lm_head: bool,
    found: Found,
) -> None:
    """Raises ValueError for a prompt that the generator refuses."""
    report = HiddenReport(0, with_prompt=True)
    request = GenerateRequest(
        str(number), TokenIds(prompt), Sampling(temperature=0.0, max_tokens=num_decoded, ignore_eos=True)
    )
    engine.add(request, report=report)
    ended: list[Generation] = []
    while engine.has_work():
        ended += engine.step()
    (generation,) = ended
    tokens = torch.tensor([*prompt, *generation.token_ids], device=engine.device)
    attention = PackedAttention([len(tokens)])

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        seen.append(weight.float() if fp32_lm_head else weight)
        return hidden.float() if fp32_lm_head else hidden

    seen: list[Tensor] = []
    theirs = scorer(tokens, torch.arange(len(tokens), device=engine.device), attention, head=head)
    ours, (weight,) = torch.cat(report.hidden), seen
    assert report.weight is not None
    start = 0
    for our_rows, their_rows in zip(
        _logprobs(ours, report.weight), _logprobs(theirs[: len(ours)], weight), strict=True
    ):
        found.add(number, start, our_rows, their_rows)
        start += len(our_rows)
    decoded = (row for rows in _logprobs(theirs[len(prompt) - 1 : -1], weight) for row in rows)
    sampled = zip(generation.token_ids, generation.logprobs, decoded, strict=True)
    for place, (token, logprob, row) in enumerate(sampled):
        found.add_decoded(number, len(prompt) + place, token, logprob, float(row[token]))


def _logprobs(hidden: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """Log-probs [T, V] of hidden states [T, M], a few rows at a time: a whole prompt's would be large."""
    for rows in hidden.split(tokens_of_chunk(weight.device.type, len(weight))):
        yield linear(rows, weight).float().log_softmax(-1)


def _device(config: RLConfig) -> str:
    wanted = config.cluster.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if wanted == "cuda" else "cpu"


def main(words: Sequence[str]) -> int:
    request = msgspec.json.decode(Path(words[0]).read_bytes(), type=Compare)
    try:
        result: Comparison | NotCompared = compare(request)
    except (ModelFolderError, TokenizerError, ValueError) as error:
        result = NotCompared(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
