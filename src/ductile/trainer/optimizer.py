"""The optimizer, with its state in place from the start, so that a checkpoint always knows what to read and write.

What it keeps is described (`ductile.config.schema.optimizer_state`), and all that saves, moves or builds it reads the
description. What it keeps in host memory (`trainer.model.optim_cpu_offload`) comes to the device for a step, a bucket
of parameters at a time: while one bucket is updated the next one comes, and the one before goes back. So the device
has three of them at most.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ductile.config.schema.optimizer_state import OptimizerTensor, Supported
from ductile.config.schema.trainer import AdamWConfig
from ductile.core.layout.memory.step_memory import BUCKET_BYTES
from ductile.parallel.data import like, local_shard
from ductile.parallel.host_copies import Copy, host_copies
from ductile.parallel.host_memory import host_like, is_host, mark_host


class Optimizer:
    """torch's optimizer of a slot's parameters."""

    def __init__(
        self,
        config: Supported,
        described: Mapping[str, Sequence[OptimizerTensor]],
        parameters: Mapping[str, nn.Parameter],
        buffers: MutableMapping[str, Tensor] | None = None,
    ) -> None:
        """Weight decay goes to every parameter, as torch does by itself.

        What is `described` of each starts as zeros, or lives in the `buffers` called `<name>/<parameter>`: this rank's
        parts, flat, taken out of the mapping.
        """
        self.state: dict[str, dict[str, Tensor]] = {}
        """What is kept for each parameter, by its name. What lies in host memory is this rank's part, a plain tensor;
        the rest is laid out as the parameter is."""
        self._described, self._parameters = described, parameters
        for name, parameter in parameters.items():
            self.state[name] = {
                kept.name: _made(kept, parameter, buffers, f"{kept.name}/{name}") for kept in described[name]
            }
        self._buckets = [
            _Bucket(_torch_optimizer(config, [parameters[name] for name in names]), names) for names in self._cut()
        ]
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
        for name in bucket.names:
            parameter, on_device = self._parameters[name], here.on_device.get(name, {})
            bucket.optimizer.state[parameter] = self.state[name] | {
                kept: like(parameter, tensor) for kept, tensor in on_device.items()
            }
        for group in bucket.optimizer.param_groups:
            group["lr"] = lr
        bucket.optimizer.step()
        bucket.optimizer.state.clear()  # it would keep what goes back

    def _bring(self, bucket: "_Bucket") -> "_Moving":
        moving = _Moving()
        for name in bucket.names:
            for kept in self._in_host_memory(name):
                host = self.state[name][kept]
                target = torch.empty_like(local_shard(self._parameters[name]), dtype=host.dtype)
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
            of_name = sum(self.state[name][kept].nbytes for kept in self._in_host_memory(name))
            if names and num_bytes + of_name > BUCKET_BYTES:
                yield names
                names, num_bytes = [], 0
            names.append(name)
            num_bytes += of_name
        yield names


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters that are updated at a time."""

    optimizer: torch.optim.Optimizer
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
    kept: OptimizerTensor, parameter: nn.Parameter, buffers: MutableMapping[str, Tensor] | None, name: str
) -> Tensor:
    """Return what is kept of a parameter: zeros, or the buffer of this name."""
    dtype: torch.dtype = getattr(torch, kept.dtype)
    if kept.layout == "scalar":
        return torch.zeros((), dtype=dtype, device=parameter.device)
    local = local_shard(parameter)
    if kept.is_offloaded:
        if buffers is None:
            return host_like(local, dtype).zero_()
        host = buffers.pop(name).view(local.shape)
        mark_host(host)
        return host
    state = torch.zeros_like(parameter.detach(), dtype=dtype) if buffers is None else like(parameter, buffers.pop(name))
    if is_host(parameter):
        mark_host(state)  # it lies where its parameter does (`trainer.model.fsdp_cpu_offload`)
    return state


def _torch_optimizer(config: Supported, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(config, AdamWConfig):
        return torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=(config.betas1, config.betas2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov and config.momentum > 0,
    )
