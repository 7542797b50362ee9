"""A training step with other systems' models in place of ductile's: torchtitan's Llama, and transformers'.

Each reads the same folder of weights and is sharded by the same FSDP2: a unit for each layer and one for what is left,
the same mixed precision, gradients that are summed. Clipping and AdamW are torch's. The samples of a rank are one
batch [B, L] of full rows, as neither has to pad or to mask then; both attend by torch's scaled_dot_product_attention:
torchtitan's own trainer takes kernels for documents that do not exist on CPUs.

B samples, L tokens a sample, V vocabulary.
"""

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ductile.config.schema.trainer import AdamWConfig, TrainerConfig
from ductile.fabric.groups import Groups
from ductile.parallel.fsdp_collectives import DirectAllGather, DirectReduceScatter
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import Sample
from ductile.roles import RoleAssignment

Score = Callable[[Tensor, Tensor], Tensor]
"""Function of input tokens [B, L] and the tokens that follow them [B, L]: the summed loss."""
Step = Callable[[], float]
"""One training step; returns the loss, a mean over the tokens of all ranks."""
MODULES = {"torchtitan": "torchtitan.models.llama3", "transformers": "transformers"}
"""What each peer's model is imported from."""


def missing(peer: str) -> str:
    """Why the peer's model cannot be had here; empty where it can."""
    try:
        importlib.import_module(MODULES[peer])
    except ImportError as error:
        return f"{peer} is not measured: {error} (pip install -e .[bench])"
    return ""


def step(config: TrainerConfig, place: RoleAssignment, samples: list[Sample], peer: str, direct: bool) -> Step:
    """A rank's step. `direct`: with ductile's collectives for CPUs (`parallel/fsdp_collectives.py`) in place of
    torch's."""
    context = ParallelContext(Groups.at(place, config.dist_timeout_seconds), place.layout)
    model, layers, score = MODELS[peer](Path(str(config.model.name)))
    shard(model, layers, context.mesh, direct)
    optim = config.optim
    assert isinstance(optim, AdamWConfig)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        betas=(optim.betas1, optim.betas2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    tokens = torch.tensor([sample.token_ids for sample in samples])
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    num_tokens = context.sum(torch.tensor(labels.numel())).item()

    def run() -> float:
        loss = score(inputs, labels)
        (loss / num_tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return context.sum(loss.detach().double()).item() / num_tokens

    return run


def shard(model: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, direct: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            if direct:
                module.set_custom_all_gather(DirectAllGather())
                module.set_custom_reduce_scatter(DirectReduceScatter())


Model = tuple[nn.Module, Iterable[nn.Module], Score]
"""A model, its layers, and how it scores."""


def transformers(folder: Path) -> Model:
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(inputs: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=inputs, labels=labels, shift_labels=labels, num_items_in_batch=1, use_cache=False).loss

    return model, model.model.layers, score


def torchtitan(folder: Path) -> Model:
    from safetensors.torch import load_file
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3 import Llama3StateDictAdapter
    from transformers import LlamaConfig

    config = llama3(LlamaConfig.from_pretrained(folder))
    model = config.build()
    model.load_state_dict(Llama3StateDictAdapter(config, None).from_hf(load_file(folder / "model.safetensors")))
    return model, model.layers.values(), lambda inputs, labels: cross_entropy_loss(model(inputs), labels)


def llama3(shape: Any) -> Any:
    """torchtitan's config of the Llama that transformers' config describes."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    size, vocab_size = shape.hidden_size, shape.vocab_size
    norm = RMSNorm.Config(normalized_shape=size, eps=shape.rms_norm_eps)
    layer = Llama3TransformerBlock.Config(
        attention_norm=norm,
        ffn_norm=norm,
        attention=make_gqa_config(
            dim=size,
            n_heads=shape.num_attention_heads,
            n_kv_heads=shape.num_key_value_heads,
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True,
            rope=ComplexRoPE.Config(
                dim=shape.head_dim,
                max_seq_len=shape.max_position_embeddings,
                theta=shape.rope_parameters["rope_theta"],
            ),
        ),
        feed_forward=make_ffn_config(
            dim=size, hidden_dim=shape.intermediate_size, w1_param_init={}, w2w3_param_init={}
        ),
    )
    return Llama3Model.Config(
        dim=size,
        vocab_size=vocab_size,
        enable_weight_tying=True,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=size),
        norm=norm,
        lm_head=Linear.Config(in_features=size, out_features=vocab_size),
        layers=[layer] * shape.num_hidden_layers,
    )


MODELS: dict[str, Callable[[Path], Model]] = {"torchtitan": torchtitan, "transformers": transformers}
