"""Release of rollouts and instances in a change of roles, as data: a resize has it done once all is prepared."""

from dataclasses import dataclass

from ductile.core.instances.instances import Instance
from ductile.core.scheduling.orders import Migration


@dataclass(frozen=True, slots=True)
class Release:
    """Rollouts that migrate to generators that are there, and instances that end after that."""

    migrations: tuple[Migration, ...] = ()
    instances: tuple[Instance, ...] = ()
