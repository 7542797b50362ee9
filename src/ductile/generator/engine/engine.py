"""Continuous batching on one device. A step: schedule, run the model once, sample, report what ended.

`add`, `abort` and `migrate_out` may come between any two steps; so may `load_weights`: every token remembers the
version it was sampled from. Nothing here blocks, sleeps or knows of processes.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ductile import host
from ductile.config.schema.inference import InferenceConfig
from ductile.core import cache_size
from ductile.core.layout.model.spec import ModelSpec
from ductile.fabric import heap
from ductile.generator.engine.cuda_graphs import CudaGraphs
from ductile.generator.engine.decode_runner import DecodeRunner, StepRecorder
from ductile.generator.engine.kv_cache import BlockPool
from ductile.generator.engine.kv_transfer import KVUnavailable, RequestKV, fetch, received
from ductile.generator.engine.limits import RequestRefused, SequenceLimits
from ductile.generator.engine.logprob_report import LogprobReport, take_likeliest
from ductile.generator.engine.paged_attention import KVCache, PagedAttention, order_for_attention, without_cudnn
from ductile.generator.engine.sampler import all_logprobs, draw, stream_key
from ductile.generator.engine.scheduler import Chunk, Scheduler
from ductile.generator.engine.sequence import Sequence
from ductile.generator.engine.step_profiler import StepLoad
from ductile.generator.engine.text_stream import TextStream
from ductile.generator.engine.weight_columns import lay_by_columns
from ductile.kernels.dispatch import linear, tell
from ductile.messages.workers import EngineStats
from ductile.model.transformer import Transformer
from ductile.records import FinishReason, GenerateRequest, Generation, KVHandle
from ductile.weights.overwrite import overwrite_all


class Engine:
    def __init__(
        self,
        model: Transformer,
        config: InferenceConfig,
        eos_token_ids: Collection[int],
        decode: Callable[[list[int], bool], str],
        device: str = "cpu",
        version: int = 0,
        recorder: StepRecorder | None = None,
    ) -> None:
        """`model` is on `device` already. `decode` turns tokens into text, without special tokens or with them, for
        stop strings; `version` names the weights that the model has now. `recorder` records decode steps; None: a GPU
        captures CUDA graphs unless the config enforces eager steps, a CPU does nothing of the kind. Raises `ValueError`
        when the cache would not hold one sequence at its longest."""
        dtype = next(model.parameters()).dtype
        weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
        num_blocks = num_cache_blocks(model.spec, config, dtype, device, weights_bytes)
        self.config = config
        self.model = model.requires_grad_(False).eval()
        if not device.startswith("cuda") and lay_by_columns(self.model):
            heap.trim()  # the rows
        self.version = version
        self.limits = SequenceLimits(model.spec.vocab_size, config.model.max_model_len, num_blocks * config.block_size)
        self.pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool, config.max_num_seqs, config.max_num_batched_tokens, config.enable_prefix_caching
        )
        self._cache = KVCache(model.spec, num_blocks, config.block_size, dtype, device)
        self._decode_runner = _decode_runner(self.model, self._cache, config, device, recorder)
        """Runs decode steps; None: they run as all others do."""
        self._attention: PagedAttention | None = None
        """Attention of the last step, which gives its windows to the next one."""
        self.device = device
        self._eos_token_ids = frozenset(eos_token_ids)
        self._decode = decode
        self._live: dict[str, Sequence] = {}
        self._ended: list[Generation] = []
        """Completions that ended outside of a step; the next step reports them."""
        self.failed: dict[str, Exception] = {}
        """Requests that the last step could not go on with, and why. They are gone; the others do not notice."""
        self._num_arrived = 0
        self._num_sampled = 0
        self.last_step: StepLoad | None = None
        """What the last step computed; None when it had nothing to compute."""

    def check(self, *requests: GenerateRequest) -> None:
        """Raise `RequestRefused` when adding these, one after the other, would."""
        ids: set[str] = set()
        for request in requests:
            known = request.id in ids or request.id in self._live
            if reason := "a request of this id is in flight already" if known else self.limits.why_not(request):
                raise RequestRefused(request.id, reason)
            ids.add(request.id)

    def fetch(self, handle: KVHandle, request: GenerateRequest, content: bytes | None = None) -> RequestKV:
        """What another engine computed of a request's context. content: the bytes, where that engine's memory is not
        this host's. Raises `KVUnavailable`, whose text says why it must be computed again."""
        if handle.version != self.version:
            raise KVUnavailable(f"was computed under version {handle.version}, and {self.version} is live here")
        num_known = len(request.prompt) + len(request.generated)
        if handle.num_tokens > num_known:
            raise KVUnavailable(f"has {handle.num_tokens} tokens, and the request {num_known}")
        shape = self._cache.shape_outside(handle.num_tokens)
        if content is not None:
            return received(handle, content, shape, self._cache.dtype)
        return fetch(handle, shape, self._cache.dtype)

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values of all blocks."""
        num_tokens = self.pool.num_blocks * self.pool.block_size
        return math.prod(self._cache.shape_outside(num_tokens)) * self._cache.dtype.itemsize

    def add(
        self, request: GenerateRequest, cache: RequestKV | None = None, report: LogprobReport | None = None
    ) -> None:
        """Take a request, a new one or one that another engine began, with what `fetch` returned for it just now.
        `report` is filled from step to step, and stays here when the request migrates. Raises `RequestRefused`."""
        self.check(request)
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids)
        sequence = Sequence(
            request=request,
            order=(-request.priority, self._num_arrived),
            stream=stream_key(sampling.seed, self.config.seed, request.id),
            max_len=self.limits.max_len(len(request.prompt), sampling.max_tokens),
            stop_ids=stops if sampling.ignore_eos else stops | self._eos_token_ids,
            # Special tokens may be written as stop strings ("<|im_end|>"), also where the text is shown without them.
            texts=[
                TextStream(self._decode, replace(sampling, skip_special_tokens=skip), prompt=request.prompt)
                for skip in (False, True)
                if sampling.stop
            ],
            imported=cache,
            report=report,
        )
        self._num_arrived += 1
        if reason := sequence.finish_reason():  # one that has migrated may have said its last word already
            self._ended.append(sequence.generation(reason))
        else:
            self._live[request.id] = sequence
            self.scheduler.add(sequence)

    def abort(self, ids: Collection[str] | None = None) -> None:
        """End these (None: all) with what they have; the next step reports them. Unknown ids have ended already."""
        for id in list(self._live) if ids is None else ids:
            if id in self._live:
                self._ended.append(self._end(self._live[id], "abort"))

    def migrate_out(
        self, ids: Collection[str], with_cache: Collection[str] = ()
    ) -> tuple[list[GenerateRequest], dict[str, RequestKV]]:
        """Forget these and return them as requests that go on where they are; ids that have ended are left out.

        A cache goes along for those in `with_cache` that have one, when all of it is of the live weights.
        """
        requests: list[GenerateRequest] = []
        caches: dict[str, RequestKV] = {}
        for id in ids:
            if (sequence := self._live.pop(id, None)) is None:
                continue
            if id in with_cache and (cache := self._computed(sequence)):
                caches[id] = cache
            self.scheduler.remove(sequence)
            requests.append(sequence.so_far())
        return requests, caches

    def has_work(self) -> bool:
        return bool(self._live or self._ended)

    def running(self) -> list[str]:
        """Ids of the requests in the batch; those that the last step gave a token are among them."""
        return [sequence.request.id for sequence in self.scheduler.running]

    def peek(self, id: str, start: int = 0) -> tuple[list[int], list[float], list[int]] | None:
        """Return what a live request has generated from completion token `start` on: tokens, log-probs, versions. None:
        it is not live."""
        sequence = self._live.get(id)
        if sequence is None:
            return None
        tokens = sequence.tokens[len(sequence.request.prompt) + start :]
        return tokens.tolist(), sequence.logprobs[start:].tolist(), sequence.versions[start:].tolist()

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Run every scheduled sequence a little further. Returns the requests that ended; see also `failed`."""
        self.failed = {}
        chunks = order_for_attention(self.scheduler.schedule())
        self.last_step = StepLoad.of(chunks, len(self.scheduler.kv_imports)) if chunks else None
        for kv_import in self.scheduler.kv_imports:
            self._cache.put_in(kv_import.sequence.blocks, kv_import.start, kv_import.end, kv_import.cache.content)
        if chunks:
            ready, logits = self._run(chunks)
            if ready:
                self._sample(ready, logits)
        ended, self._ended = self._ended, []
        return ended

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Sample from these weights (all of the model's, by its own names) from the next step on.

        Requests in flight go on. They compute their keys and values anew, so that each token's log-prob is what its
        version says of everything before it; with `keep_cache_on_update` they keep those of the older weights.
        Raises `ValueError`, with nothing changed, when names or shapes are not the model's.
        """
        overwrite_all(self.model, tensors, version)
        self.version = version
        self.scheduler.weights_changed(keep_cache=self.config.keep_cache_on_update)

    def swap_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """`load_weights` without a copy: the engine samples from these very tensors, which lie in memory as its own do
        (`ductile.weights.live_weights.LiveWeights.room`)."""
        for name, parameter in self.model.named_parameters():
            parameter.data = tensors[name]
        if self._decode_runner is not None:
            self._decode_runner.weights_moved()
        self.version = version
        self.scheduler.weights_changed(keep_cache=self.config.keep_cache_on_update)

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.named_parameters()

    def num_generated(self) -> dict[str, int]:
        """Tokens generated so far, by request in flight."""
        return {id: sequence.num_generated for id, sequence in self._live.items()}

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_tokens=self._num_sampled,
            num_preempted=self.scheduler.num_preempted,
            cache_used=1 - self.pool.num_free / self.pool.num_blocks,
            version=self.version,
        )

    def _computed(self, sequence: Sequence) -> RequestKV | None:
        if sequence.num_computed and self.scheduler.is_pure(sequence):
            content = self._cache.take_out(sequence.blocks, sequence.num_computed)
            return RequestKV(content, self.version)
        return sequence.imported  # it came with one, and waits

    def _run(self, chunks: list[Chunk]) -> tuple[list[Sequence], Tensor]:
        """One forward pass. Returns the sequences whose next token can be sampled, and its logits [N, V]."""
        if self._decode_runner is not None and (decoded := self._decode_runner.run(chunks)):
            self._attention = None  # its windows lack this step's tokens
            if decoded.is_recorded and self.last_step is not None:
                self.last_step = replace(self.last_step, is_recorded=True)
            return [chunk.sequence for chunk in chunks], decoded.logits
        token_ids: list[int] = []
        positions: list[int] = []
        ready: list[Sequence] = []
        last_rows: list[int] = []
        for chunk in chunks:
            token_ids += chunk.sequence.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if chunk.reaches_the_end:
                ready.append(chunk.sequence)
                last_rows.append(len(token_ids) - 1)
        self._attention = PagedAttention(self._cache, chunks, self._attention)
        rows = torch.tensor(last_rows, dtype=torch.int64, device=self.device)  # there may be none

        def head(hidden: Tensor, weight: Tensor) -> Tensor:
            """Prefilled tokens need no logits, unless a client asks for theirs: only the last one's hidden state goes
            to the vocabulary."""
            hidden, weight = _head_inputs(self.config, hidden, weight)
            offset = 0
            for chunk in chunks:
                if (report := chunk.sequence.report) and report.with_prompt:
                    of_chunk = hidden[offset : offset + chunk.count]
                    report.score_prompt(chunk.sequence.request.prompt, chunk.start, of_chunk, weight)
                offset += chunk.count
            return linear(hidden[rows], weight)

        with without_cudnn():
            logits = self.model(
                torch.tensor(token_ids, device=self.device),
                torch.tensor(positions, device=self.device),
                self._attention,
                head=head,
            )
        return ready, logits

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> None:
        samplings = [sequence.request.sampling for sequence in sequences]
        of_all = all_logprobs(logits, samplings)
        tokens, logprobs = draw(
            of_all,
            samplings,
            [sequence.stream for sequence in sequences],
            [sequence.num_generated for sequence in sequences],
        )
        self._num_sampled += len(sequences)
        take_likeliest([sequence.report for sequence in sequences], of_all)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            try:
                reason = self._append(sequence, token, logprob)
            except Exception as error:  # whatever one request makes fail, the others go on
                self._end(sequence, "abort")
                self.failed[sequence.request.id] = error
                continue
            if reason:
                self._ended.append(self._end(sequence, reason))

    def _append(self, sequence: Sequence, token: int, logprob: float) -> FinishReason | None:
        if not math.isfinite(logprob):
            raise FloatingPointError(
                f"request {sequence.request.id}: weights of version {self.version} give logits that are not finite"
            )
        sequence.append(token, logprob, self.version)
        return sequence.finish_reason()

    def _end(self, sequence: Sequence, reason: FinishReason) -> Generation:
        del self._live[sequence.request.id]
        self.scheduler.remove(sequence)
        return sequence.generation(reason)


def _head_inputs(config: InferenceConfig, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the head multiplies, in the dtype of the logits."""
    return (hidden.float(), weight.float()) if config.model.fp32_lm_head else (hidden, weight)


def _decode_runner(
    model: Transformer, cache: KVCache, config: InferenceConfig, device: str, recorder: StepRecorder | None
) -> DecodeRunner | None:
    """What runs the engine's decode steps, by this recorder or, on a GPU, by CUDA graphs."""
    on_gpu = device.startswith("cuda")
    if recorder is None:
        if not on_gpu or config.model.enforce_eager:
            return None
        recorder = CudaGraphs(device)

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear(*_head_inputs(config, hidden, weight))

    runner = DecodeRunner(model, cache, config.max_num_seqs, config.model.max_model_len, head, recorder)
    if on_gpu and runner.why_gathered:
        tell(f"CUDA graphs of decode steps copy the KV cache's blocks: {runner.why_gathered}")
    return runner


def num_cache_blocks(
    spec: ModelSpec, config: InferenceConfig, dtype: torch.dtype, device: str = "cpu", weights_bytes: int = 0
) -> int:
    """What `num_blocks` says, or enough for every sequence at its longest, as far as the memory goes.

    Raises `ValueError` when it does not go as far as one such sequence.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    one = -(-config.model.max_model_len // config.block_size)
    cache_bytes, source = _cache_bytes(config, device, weights_bytes)
    block_bytes = cache_size.token_bytes(spec, dtype.itemsize) * config.block_size
    fitting = cache_size.num_blocks(cache_bytes, block_bytes, wanted=config.max_num_seqs * one)
    if fitting < one:
        raise ValueError(
            f"{source} gives the KV cache room for {fitting * config.block_size} tokens, and model.max_model_len is "
            f"{config.model.max_model_len}: lower it, or raise cache_memory_gib"
        )
    return fitting


def _cache_bytes(config: InferenceConfig, device: str, weights_bytes: int) -> tuple[int, str]:
    """Memory for the cache, and what decided it."""
    if config.cache_memory_gib is not None:
        return int(config.cache_memory_gib * 2**30), f"cache_memory_gib {config.cache_memory_gib}"
    if not device.startswith("cuda"):
        return cache_size.cpu_cache_bytes(host.memory_bytes())
    utilization = config.gpu_memory_utilization or cache_size.GPU_UTILIZATION
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    found = cache_size.gpu_cache_bytes(total_bytes, free_bytes, weights_bytes, utilization)
    return found, f"gpu_memory_utilization {utilization}"
