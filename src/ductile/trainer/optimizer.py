"""The optimizer, with its state in place from the start, so that a checkpoint always knows what to read and write.

    adamw, sgd    torch's own (`TorchRule`)
    adamw, 8bit   matrices by `ductile.trainer.adamw_8bit`, the rest as above
    muon          matrices of layers by `ductile.trainer.muon`, the rest by torch's AdamW
    sign_sgd      `SignSGD`

What it keeps is described (`ductile.config.schema.optimizer_state`), and all that saves, moves or builds it reads the
description. What it keeps in host memory (`trainer.model.optim_cpu_offload`) comes to the device for a step, a bucket
of parameters at a time: while one bucket is updated the next one comes, and the one before goes back. So the device
has three of them at most.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ductile.config.schema.optimizer_state import OptimizerTensor
from ductile.config.schema.trainer import AdamWConfig, MuonConfig, OptimConfig, SGDConfig, SignSGDConfig
from ductile.core.layout.memory.optimizer_memory import BUCKET_BYTES
from ductile.core.layout.model.parameters import is_layer_matrix, is_norm_or_bias
from ductile.parallel.data import like, local_shard
from ductile.parallel.host_copies import Copy, host_copies
from ductile.parallel.host_memory import host_like, is_host, mark_host
from ductile.trainer.adamw_8bit import AdamW8bit
from ductile.trainer.muon import Muon, WholeMatrices


class UpdateRule(Protocol):
    """A way to update some of a slot's parameters."""

    def step(self, lr: float, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Update the parameters by their gradients. `state` has this rank's part of what is kept, on the parameters'
        device, by parameter and name; it is changed in place."""
        ...


class Optimizer:
    """The optimizer of a slot's parameters."""

    def __init__(
        self,
        config: OptimConfig,
        described: Mapping[str, Sequence[OptimizerTensor]],
        parameters: Mapping[str, nn.Parameter],
        buffers: MutableMapping[str, Tensor] | None = None,
        matrices: WholeMatrices | None = None,
    ) -> None:
        """All that is `described` of each starts as zeros, or lives in the `buffers` called `<name>/<parameter>`: this
        rank's parts, flat, taken out of the mapping. `matrices`: what Muon exchanges matrices by.
        """
        self.state: dict[str, dict[str, Tensor]] = {}
        """This rank's part of what is kept for each parameter, by its name; plain tensors."""
        self._described, self._parameters, self._matrices = described, parameters, matrices
        for name, parameter in parameters.items():
            self.state[name] = {kept.name: _made(kept, name, parameter, buffers) for kept in described[name]}
        self._buckets = [_Bucket(self._rules(config, names), names) for names in self._cut()]
        self._copies = host_copies(next(iter(parameters.values())).device)

    def step(self, lr: float) -> None:
        """Update the parameters by their gradients, with this learning rate."""
        coming = self._bring(self._buckets[0])
        leaving: list[_Moving] = []
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            here, coming = coming, self._bring(following) if following is not None else coming
            here.wait()
            self._update(bucket, here, lr)
            leaving.append(self._return(here))
            for moving in leaving[:-1]:
                moving.finish()  # so that the device has three buckets at most
            del leaving[:-1]
        leaving[0].finish()

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def set_num_updates(self, num_updates: int) -> None:
        """Set the scalars, such as the count that Adam's bias correction keeps for each parameter."""
        for name, described in self._described.items():
            for kept in described:
                if kept.layout == "scalar":
                    self.state[name][kept.name].fill_(float(num_updates))

    def _update(self, bucket: "_Bucket", here: "_Moving", lr: float) -> None:
        state = {name: self.state[name] | here.on_device.get(name, {}) for name in bucket.names}
        for rule in bucket.rules:
            rule.step(lr, state)

    def _bring(self, bucket: "_Bucket") -> "_Moving":
        moving = _Moving()
        for name in bucket.names:
            for kept in self._in_host_memory(name):
                host = self.state[name][kept]
                target = torch.empty_like(host, device=self._parameters[name].device)
                moving.on_device.setdefault(name, {})[kept] = target
                moving.copies.append(self._copies.start(host, target))
        return moving

    def _return(self, here: "_Moving") -> "_Moving":
        copies = [
            self._copies.start(tensor, self.state[name][kept])
            for name, on_device in here.on_device.items()
            for kept, tensor in on_device.items()
        ]
        return _Moving(here.on_device, copies)

    def _in_host_memory(self, name: str) -> list[str]:
        return [kept.name for kept in self._described[name] if kept.is_offloaded]

    def _cut(self) -> Iterator[list[str]]:
        """Names of the parameters of each bucket: one has all where nothing is offloaded."""
        names: list[str] = []
        num_bytes = 0
        for name in self._parameters:
            of_name = sum(self._bytes_of(name, self.state[name][kept]) for kept in self._in_host_memory(name))
            if names and num_bytes + of_name > BUCKET_BYTES:
                yield names
                names, num_bytes = [], 0
            names.append(name)
            num_bytes += of_name
        yield names

    def _bytes_of(self, name: str, kept: Tensor) -> int:
        """Bytes by which buckets are cut. With Muon all of a stage's slots cut alike, as they exchange the matrices of
        one bucket after the other."""
        return kept.nbytes if self._matrices is None else self._matrices.even_share(name) * kept.itemsize

    def _rules(self, config: OptimConfig, names: Sequence[str]) -> list[UpdateRule]:
        """Return the rules of a bucket, by what is kept of a parameter and whether it decays."""
        groups: dict[tuple[Callable[..., UpdateRule], float], dict[str, nn.Parameter]] = {}
        for name in names:
            decays = config.decay_norms_and_biases or not is_norm_or_bias(name)
            kind = (self._kind(config, name), config.weight_decay if decays else 0.0)
            groups.setdefault(kind, {})[name] = self._parameters[name]
        return [make(config, parameters, weight_decay) for (make, weight_decay), parameters in groups.items()]

    def _kind(self, config: OptimConfig, name: str) -> "Callable[..., UpdateRule]":
        if isinstance(config, SignSGDConfig):
            return SignSGD
        if isinstance(config, MuonConfig) and is_layer_matrix(name):
            return self._muon
        return AdamW8bit if any(kept.columns for kept in self._described[name]) else TorchRule

    def _muon(self, config: MuonConfig, parameters: Mapping[str, nn.Parameter], weight_decay: float) -> Muon:
        assert self._matrices is not None
        return Muon(config, parameters, weight_decay, self._matrices)


class TorchRule:
    """One of torch's optimizers."""

    def __init__(self, config: OptimConfig, parameters: Mapping[str, nn.Parameter], weight_decay: float) -> None:
        self._parameters = parameters
        self._optimizer = _torch_optimizer(config, [*parameters.values()], weight_decay)

    def step(self, lr: float, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, parameter in self._parameters.items():
            self._optimizer.state[parameter] = {
                kept: like(parameter, tensor) if tensor.dim() else tensor for kept, tensor in state[name].items()
            }
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.state.clear()  # it would keep what goes back


class SignSGD:
    """Steps of one length, against the gradient's sign."""

    def __init__(self, config: OptimConfig, parameters: Mapping[str, nn.Parameter], weight_decay: float) -> None:
        self._parameters, self._weight_decay = parameters, weight_decay

    @torch.no_grad()
    def step(self, lr: float, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for parameter in self._parameters.values():
            assert parameter.grad is not None, "the trainer has looked for a gradient"
            weights = local_shard(parameter).mul_(1 - lr * self._weight_decay)
            weights.sub_(local_shard(parameter.grad).sign(), alpha=lr)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters that are updated at a time."""

    rules: Sequence[UpdateRule]
    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Moving:
    """Offloaded state of a bucket on the device, and the copies that bring it there or back."""

    on_device: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    """Tensors by parameter and name of what is kept."""
    copies: list[Copy] = field(default_factory=list[Copy])

    def wait(self) -> None:
        for copy in self.copies:
            copy.wait()

    def finish(self) -> None:
        """Return once all copies are done, and let go of what is on the device."""
        for copy in self.copies:
            copy.finish()
        self.on_device.clear()


def _made(
    kept: OptimizerTensor,
    name: str,
    parameter: nn.Parameter,
    buffers: MutableMapping[str, Tensor] | None,
) -> Tensor:
    """Return what is kept of a parameter: zeros, or its buffer."""
    dtype: torch.dtype = getattr(torch, kept.dtype)
    if kept.layout == "scalar":
        return torch.zeros((), dtype=dtype, device=parameter.device)
    local = local_shard(parameter)
    shape = (len(local), local.shape[1] // kept.columns) if kept.layout == "blocks" else local.shape
    if buffers is not None:
        state = buffers.pop(f"{kept.name}/{name}").view(shape)
    elif kept.is_offloaded:
        state = host_like(local.new_empty(1).expand(shape), dtype).zero_()
    else:
        state = local.new_zeros(shape, dtype=dtype)
    # Or it lies where its parameter does (`trainer.model.fsdp_cpu_offload`).
    if kept.is_offloaded or is_host(parameter):
        mark_host(state)
    return state


def _torch_optimizer(
    config: OptimConfig, parameters: Sequence[nn.Parameter], weight_decay: float
) -> torch.optim.Optimizer:
    if isinstance(config, SGDConfig):
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=weight_decay,
            nesterov=config.nesterov and config.momentum > 0,
        )
    assert isinstance(config, AdamWConfig | MuonConfig)
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.betas1, config.betas2),
        eps=config.eps,
        weight_decay=weight_decay,
        fused=True,
    )
