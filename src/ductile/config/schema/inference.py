"""[inference]: the generators. It is also the whole config of `ductile inference`."""

from typing import Annotated, Literal

from pydantic import Field

from ductile.config.schema.fleet import FleetConfig
from ductile.config.schema.http_server import HttpServerConfig
from ductile.config.schema.model import AdaptedModelConfig, ChatModelConfig
from ductile.config.schema.section import NotBuilt, Section


class ServerConfig(HttpServerConfig):
    served_model_name: str | None = Field(default=None, min_length=1)
    """What clients call the model; default: `model.name`."""
    generation_config: Literal["auto", "ignore"] = "auto"
    """Sampling of requests that say nothing of it. auto: by `temperature`, `top_p`, `top_k`, `min_p` and
    `max_new_tokens` of the model's generation_config.json, as vLLM does; ignore: from all tokens at temperature 1."""
    max_sequences: int = Field(default=4096, ge=1)
    """Sequences (prompts times `n`) in the server at a time. A request that alone has more is refused; one that finds
    no room gets 503, to be tried again."""
    stage_weights: bool = True
    """True: new weights are staged beside the live ones, so that requests go on and an update can be taken back.
    false takes half the memory: weights are overwritten as they come, and nothing is generated until the commit."""


class ParallelConfig(Section):
    tp: Annotated[int, NotBuilt("tensor-parallel generation")] = Field(default=1, ge=1)
    """Slots that hold one copy of the model."""
    dp: int | None = Field(default=None, ge=1)
    """Copies of the model. In `ductile rl` it must equal the generate slots divided by `tp`, or be left out. In
    `ductile inference`: servers on this machine, each on a device of its own, with a router before them; default 1."""


class InferenceModelConfig(ChatModelConfig, AdaptedModelConfig):
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on a CPU."""
    fp32_lm_head: bool = False
    """Logits are products of fp32 numbers also where `dtype` is bfloat16: what `trainer.model.fp32_lm_head` is to the
    trainer. Each step makes an fp32 copy of the output embeddings."""
    enforce_eager: bool = False
    """A GPU launches the kernels of a decode step one by one, as it always does for prompts. false: by CUDA graphs, one
    for each number of sequences, which are captured when it first comes; they read the KV cache in place where
    `block_size` is a multiple of 256, else copies. Without effect on a CPU."""
    max_model_len: int = Field(default=2048, ge=2)
    """Longest prompt plus completion, in tokens. Left out: the model's max_position_embeddings, in `rl` this at most,
    in `inference` as far as the KV cache holds them."""


class EngineConfig(Section):
    model: InferenceModelConfig = InferenceModelConfig()
    server: ServerConfig = ServerConfig()
    parallel: ParallelConfig = ParallelConfig()
    engine: Annotated[
        Literal["ductile", "vllm", "sglang"], NotBuilt("engines of other systems", only=("vllm", "sglang"))
    ] = "ductile"
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that run at once on one generator."""
    max_num_batched_tokens: int = Field(default=1024, ge=16)
    """Tokens of one engine step, prefill and decode together; longer prompts are prefilled in chunks."""
    block_size: int = Field(default=16, ge=1)
    """Tokens in a KV-cache block."""
    num_blocks: int | None = Field(default=None, ge=2)
    """KV-cache blocks; default: enough for `max_num_seqs` sequences of `max_model_len`, as far as the memory goes."""
    cache_memory_gib: float | None = Field(default=None, gt=0)
    """The KV cache's memory. Default: on a GPU what `gpu_memory_utilization` leaves beside the weights, on a CPU a
    sixteenth of the machine's memory, 4 at most. Not beside `num_blocks`."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that a generator takes, weights and cache together. Default: 0.9, and in `rl` 0.4 where
    slots that generate may train or score as well, divided by `cluster.slots_per_device`. Not beside `num_blocks` or
    `cache_memory_gib`."""
    enable_prefix_caching: bool = True
    keep_cache_on_update: bool = False
    """Sequences in flight keep the keys and values of the old weights when new ones arrive, instead of computing them
    again. Faster; the rest of such a sequence is then sampled from a mixture that no single version is."""
    seed: int = 0


class InferenceConfig(FleetConfig, EngineConfig):
    """[inference]: what a generator is, and how a fleet of servers is run."""


def shared_block_tokens(config: InferenceConfig) -> int:
    """Tokens in a KV-cache block that sequences with the same beginning share; 0 where they share none."""
    return config.block_size if config.enable_prefix_caching else 0
