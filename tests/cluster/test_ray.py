"""Ray where it is not installed. With it: `make cluster-test`."""

import asyncio
import sys

import pytest

from ductile.cluster.cluster import StartFailed
from ductile.cluster.ray.connection import RayConnection
from ductile.cluster.ray.node_actor import AgentPlace
from ductile.config.schema.cluster import RayConfig


def test_a_machine_without_ray_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    async def opened() -> None:
        connection = RayConnection(RayConfig(address="auto"))
        try:
            await connection.open(60.0)
        finally:
            await connection.close()

    with pytest.raises(StartFailed, match=r"no module 'ray' here: pip install \"ductile\[ray\]\"$"):
        asyncio.run(opened())


def test_the_key_of_a_run_is_in_no_text_of_what_an_actor_is_given() -> None:
    assert "secret" not in str(AgentPlace("10.0.0.1:7", "secret", 1, "/work"))
