"""The slots that train together, connected: where tensors lie among them, and how numbers are summed over all."""

import torch.distributed as dist
from torch import Tensor

from ductile.fabric.groups import Groups
from ductile.records import Formation


class Ranks:
    """A formation's process groups, as one of its members sees them."""

    def __init__(self, groups: Groups, formation: Formation) -> None:
        """Makes the groups that are needed; collective over the members, which make no others meanwhile."""
        self.formation = formation
        self.everyone = groups.group(formation.members)
        self.mesh = groups.mesh(formation.members, formation.replicas)
        """Mesh of one axis, or of two (replicas, then shards) when there are several replicas."""
        self.rank = dist.get_rank(self.everyone)
        self.num_on_device = groups.num_on_device(formation.members)
        """Members that share this member's GPU, itself among them."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor in place, over all ranks."""
        dist.all_reduce(tensor, group=self.everyone)
        return tensor
