"""[model] and [trainer.model]: which weights, in which precision, and how they are spread."""

import sys
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from ductile.config.schema.section import FilePath, NotBuilt, Section
from ductile.core.layout.geometry.pipeline_schedule import PipelineSchedule
from ductile.core.layout.model.lora import PROJECTIONS, LoraSpec


class VisionConfig(Section):
    vision_encoder_attr: str | None = None
    language_model_attr: str | None = None
    freeze_vision_encoder: bool = True


class ModelConfig(Section):
    name: FilePath | None = None
    """A Hugging Face model folder (config.json, safetensors, tokenizer files)."""
    vlm: Annotated[VisionConfig | None, NotBuilt("vision-language models")] = None


class ChatModelConfig(ModelConfig):
    """A model as those have it who turn conversations into its tokens: all of a command's tokenizers are made of it
    (`ductile.tasks.tokenizer.Tokenizer.of`)."""

    chat_template: FilePath | None = None
    """A Jinja file; default: the model folder's own. Models that are trained with it are saved with it."""
    chat_template_kwargs: dict[str, object] = {}
    """Variables of the chat template: {"enable_thinking": false}. Models that are trained with them are saved with a
    template that has them as defaults; a request to a server may say others."""


CheckpointTarget = Literal["norm", "attn_proj", "mlp"]


class ActivationCheckpointing(Section):
    mode: Literal["full", "selective"] = "full"
    """full: of a layer its input is kept, and all else is computed again; selective: what `targets` names is."""
    freq: int = Field(default=1, ge=1)
    """Checkpoint every n-th layer."""
    targets: list[CheckpointTarget] = Field(default=["norm"], min_length=1)
    """What `selective` computes again. norm: norms and what else is done element by element; attn_proj: products before
    and behind attention; mlp: products of the MLP. Attention itself is kept."""


class ActivationOffloading(Section):
    pin_memory: bool = True
    """Copies go through page-locked host memory, so that they run beside the arithmetic. Without effect on a CPU."""
    max_inflight_activations: int = Field(default=5, ge=1)
    """Most activations on their way to or from host memory at a time; the device holds no more of them."""


class FullOffloadConfig(Section):
    cpu_optimizer_backend: Literal["native", "torch"] = "native"
    numa_bind: bool = True


class QuantizationConfig(Section):
    type: Annotated[Literal["fp8", "mxfp8"], NotBuilt("products with scales of 32 numbers", only=("mxfp8",))] = "fp8"


class CompileConfig(Section):
    fullgraph: Annotated[
        bool,
        NotBuilt("layers that are one graph", instead="Attention and collectives stay outside of compiled code."),
    ] = False
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: code is generated, with a C++ compiler on a CPU and with Triton on a GPU; aot_eager: layers are traced
    alike, and run torch's own operators: which of the two steps a failure is of."""


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """Low-rank adapters, which alone are trained: y = W x + (alpha / rank) B (A x), as PEFT has them."""

    rank: int = Field(default=16, ge=1)
    """Rows of each A, and columns of each B."""
    alpha: float = Field(default=32.0, gt=0)
    """Factor of the product of B and A, times `rank`."""
    dropout: Annotated[float, NotBuilt("dropout before adapters")] = Field(default=0.0, ge=0, lt=1)
    target_modules: list[Projection] = []
    """Projections that have an adapter; empty: all of a layer."""
    modules_to_save: Annotated[list[str], NotBuilt("training modules whole beside adapters")] = []

    @property
    def spec(self) -> LoraSpec:
        """The adapters as the model has them; targets in the order of a layer."""
        wanted = frozenset[str](self.target_modules or PROJECTIONS)
        return LoraSpec(self.rank, self.alpha, tuple(name for name in PROJECTIONS if name in wanted))


class AdaptedModelConfig(ModelConfig):
    """A model that may have adapters beside its weights."""

    lora: LoraConfig | None = None
    """Adapters beside the weights (docs/lora.md): they alone are trained, published and received."""

    @property
    def adapters(self) -> LoraSpec | None:
        """The adapters of the model; None: it has none."""
        return None if self.lora is None else self.lora.spec


class DebugConfig(Section):
    num_layers: int | None = Field(default=None, ge=1)
    """Keep only the first n layers of the model."""
    random_init: bool = False
    """Random weights of the folder's shape, instead of its weights."""
    force_balanced_routing: Annotated[bool, NotBuilt("mixture of experts")] = False


class TrainerModelConfig(AdaptedModelConfig):
    seq_len: int = Field(default=2048, ge=2)
    """Tokens a rank packs into one micro-batch. A longer sample is refused by the trainer."""
    impl: Annotated[Literal["custom", "auto", "hf"], NotBuilt("running transformers' own model code", only=("hf",))] = (
        "auto"
    )
    """`auto` and `custom` are ductile's own models; there is no other implementation."""
    attn: Annotated[
        Literal[
            "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "fa3", "fa4", "flex"
        ],
        NotBuilt("attention that holds all scores", only=("eager",), instead='Write "sdpa".'),
    ] = "auto"
    """`auto` and `sdpa` are the same. On a CPU attention is ductile's own; on a GPU it is torch's variable-length
    kernel, or torch's scaled_dot_product_attention, document by document, where the kernel does not take the device,
    the dtype or the heads. flash_attention_2: that kernel and no other. flash_attention_3 (fa3), flash_attention_4
    (fa4): those of the packages flash_attn_interface and flash_attn.cute in its place, in the whole process of a slot.
    flex: torch's FlexAttention on a GPU, which keeps no copies of a shared prompt's keys; it needs the package triton.
    A slot that lacks what the kernel needs refuses to start."""
    optimization_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the sharded parameters, which the optimizer updates."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the forward and backward arithmetic. Default: bfloat16 on a GPU, float32 on a CPU."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradient reductions."""
    reduce_every: Literal["micro_step", "step"] = "micro_step"
    """micro_step: ranks add their gradients up in the backward pass of each micro-batch; with `pp` behind those of a
    whole schedule, as no stage may wait for a sum while another waits for it. step: once before the optimizer step, and
    before the trainer moves to other slots; until then each rank keeps the gradients of all weights that it computes
    with, in `reduce_dtype`."""
    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the state (HSDP); each is sharded over its part of the train slots, whose number it must divide."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass; false keeps them until the backward pass. With `pp` they are
    kept while a stage has micro-batches to run."""
    fsdp_cpu_offload: bool = False
    """Parameters, gradients and optimizer state lie in host memory, where the optimizer steps; the device holds the
    parameters of a layer while it computes."""
    optim_cpu_offload: bool = False
    """The optimizer's moments lie in host memory and come to the device a bucket at a time for the optimizer step."""
    full_offload: Annotated[FullOffloadConfig | None, NotBuilt("an optimizer on the CPU")] = None
    """Keep optimizer state in host memory and update there, while the backward pass runs."""
    tp: Annotated[int, Ge(1)] | Literal["auto"] = 1
    """Slots over which each weight matrix is cut, in columns, heads or rows of the vocabulary; between the products
    each has a part of the tokens. A number holds for every number of slots that the trainer is given by a scheduler or
    by hand, but for `trainer.resize.layouts`. "auto": the fewest with which no data-parallel rank is without samples
    and, where `cluster.device_memory_gib` says how much there is, a slot has room."""
    pp: Annotated[int, Ge(1)] | Literal["auto"] = 1
    """Stages of a pipeline: each has some of the layers. Which ones follows: stages take about equally long. A number
    is kept like that of `tp`. "auto": more than one only where a larger `tp` does not help."""
    pp_schedule: PipelineSchedule = "1f1b"
    """Order in which a slot of a pipeline runs forward and backward passes. interleaved: 1f1b with several runs of
    layers on each slot (`vpp`); zero_bubble: gradients of weights wait until the slot would wait for another stage; it
    needs torch 2.13."""
    vpp: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    """Runs of layers on each slot of `pp`; Megatron: `virtual_pipeline_model_parallel_size`. "auto": 2 with
    `pp_schedule` "interleaved", else 1."""
    cp: int = Field(default=1, ge=1)
    """Slots over which the tokens of a micro-batch are split. The number is kept like that of `tp`."""
    cp_style: Literal["auto", "ulysses", "ring"] = "auto"
    """Way in which attention crosses the parts of `cp`. ulysses: each slot has all tokens and some of the heads, whose
    number `cp` must divide. ring: keys and values go round; a shared prompt is run for each of its completions. auto:
    ulysses where the model can have it."""
    ep: Annotated[int | Literal["auto"], NotBuilt("expert parallelism")] = 1
    ep_comm_backend: Annotated[Literal["torch", "deepep"], NotBuilt("expert parallelism")] = "torch"
    deepep_num_sms: Annotated[int, NotBuilt("expert parallelism")] = Field(default=20, ge=1)
    deepep_token_chunk_size: Annotated[int | None, NotBuilt("expert parallelism")] = Field(default=None, ge=1)
    moe_use_grouped_mm: Annotated[bool, NotBuilt("mixture of experts")] = True
    moe_router_dtype: Annotated[Literal["float32", "bfloat16"], NotBuilt("mixture of experts")] = "float32"
    moe_fused_kernel: Annotated[bool, NotBuilt("mixture of experts")] = False
    freeze_moe_router: Annotated[bool, NotBuilt("mixture of experts")] = False
    ac: ActivationCheckpointing | None = None
    """Layers compute their activations again in the backward pass, instead of keeping them."""
    ac_offloading: ActivationOffloading | None = None
    """What layers keep for the backward pass goes to host memory, and comes back before it is needed."""
    compile: CompileConfig | None = None
    """Layers run code that torch.compile makes of them, all but attention and collectives. A step tells how much of it
    was made (`compile/graphs`) or made again (`compile/recompiles`). What cannot be compiled runs as without, and the
    slot's log says so."""
    fp8: bool = False
    """Layers multiply inputs and weights as numbers of 8 bits (e4m3) with a scale for each row, forward and for the
    gradients of inputs; gradients of weights, adapters and the head are in `compute_dtype`, which must be bfloat16. It
    needs a GPU of compute capability 8.9 or later; other slots refuse to start. Scorers and generators multiply in
    `compute_dtype`."""
    quantization: QuantizationConfig | None = None
    """`type = "fp8"` is another spelling of `fp8 = true`."""
    fp32_lm_head: bool = False
    """Logits are products of fp32 numbers also where the arithmetic is bfloat16's: the head multiplies hidden states
    and weights, which are bfloat16 numbers there, as fp32 ones, and so their gradients. In scorers, too; in generators
    by `inference.model.fp32_lm_head`."""
    fused_lm_head_token_chunk_size: Annotated[int, Ge(1)] | Literal["auto", "disabled"] = "auto"
    """Tokens whose logits exist at a time, when trained tokens are scored: auto: as many as have 2^25 logits (128 MiB),
    on a GPU 2^27 (512 MiB); disabled: all of a micro-batch."""
    debug: DebugConfig = DebugConfig()

    @property
    def multiplies_8_bits(self) -> bool:
        """Return whether layers multiply numbers of 8 bits."""
        return self.fp8 or self.quantization is not None

    @property
    def key_of_8_bits(self) -> str:
        """The key that says so."""
        return "fp8" if self.fp8 else "quantization"

    @property
    def head_chunk_tokens(self) -> int | None:
        """`fused_lm_head_token_chunk_size` as a number of tokens; None lets the head choose it."""
        size = self.fused_lm_head_token_chunk_size
        return {"auto": None, "disabled": sys.maxsize}[size] if isinstance(size, str) else size


def why_not_selective(model: TrainerModelConfig) -> str:
    """Return why `ac.mode` cannot be "selective", as a sentence goes on after its subject; "" where it can, or is
    not."""
    if model.ac is None or model.ac.mode == "full" or model.pp_schedule != "zero_bubble":
        return ""
    return (
        'cannot be with pp_schedule = "zero_bubble", whose backward pass runs a layer twice, as what is kept is there '
        'once. Write ac.mode = "full", or pp_schedule = "1f1b"'
    )


def excluded_pairs(model: TrainerModelConfig, has_stages: bool) -> Iterator[tuple[str, str, str]]:
    """Yield two keys of the model that cannot be together as they are, and why, as a sentence goes on after the first.
    has_stages: whether there is a pipeline."""
    selective = model.ac is not None and model.ac.mode == "selective"
    if model.compile is not None and selective:
        why = (
            'cannot be with ac.mode = "selective", which decides for each operator whether it is run again: compiled '
            'code has none of them, and keeps what its compiler finds worth keeping. Write ac.mode = "full", or leave '
            "one of them out"
        )
        yield "compile", "ac.mode", why
    if model.compile is not None and has_stages and model.pp_schedule == "zero_bubble":
        why = (
            'cannot be with pp_schedule = "zero_bubble", which makes gradients of weights after those of inputs: '
            'compiled code makes both at once. Write pp_schedule = "1f1b", or leave one of them out'
        )
        yield "compile", "pp_schedule", why
    if model.multiplies_8_bits and has_stages and model.pp_schedule == "zero_bubble":
        why = (
            'cannot be with pp_schedule = "zero_bubble", which makes gradients of weights after those of inputs, and '
            'here both would be made twice. Write pp_schedule = "1f1b", or leave one of them out'
        )
        yield model.key_of_8_bits, "pp_schedule", why
    if model.multiplies_8_bits and model.compile is not None:
        yield (
            model.key_of_8_bits,
            "compile",
            "cannot be with compile, as torch does not trace it. Leave one of them out",
        )
    if model.multiplies_8_bits and selective:
        why = (
            'cannot be with ac.mode = "selective", which knows products by their operator, and not those of 8 bits. '
            'Write ac.mode = "full", or leave one of them out'
        )
        yield model.key_of_8_bits, "ac.mode", why
    if model.attn == "flex" and selective:
        why = (
            'cannot be with ac.mode = "selective", which knows attention by its operator: FlexAttention has none. '
            'Write ac.mode = "full", or attn = "auto"'
        )
        yield "attn", "ac.mode", why
    if model.attn == "flex" and model.cp_style == "ring":
        why = (
            'cannot be with cp_style = "ring", which puts attention together from the parts of flash kernels. Write '
            'cp_style = "ulysses", or attn = "auto"'
        )
        yield "attn", "cp_style", why


class SFTModelConfig(ChatModelConfig, TrainerModelConfig):
    """The model of `ductile sft`, which trains it on conversations."""
