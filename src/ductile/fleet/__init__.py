"""The orchestrator's side of slots and servers. `ductile.fleet.ElasticFleet` is the fleet of servers as one object."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ductile.fleet.elastic_fleet import ElasticFleet

__all__ = ["ElasticFleet"]


def __getattr__(name: str) -> Any:
    if name != "ElasticFleet":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ductile.fleet.elastic_fleet import ElasticFleet

    return ElasticFleet
