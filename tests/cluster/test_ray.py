"""Ray where it is not installed. With it: `make cluster-test`."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from ductile.cluster.cluster import StartFailed
from ductile.cluster.ray.connection import RayConnection, find_draining
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


@pytest.mark.parametrize("there", [True, False], ids=["has it", "has none"])
def test_nodes_that_drain_are_asked_of_versions_that_tell(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    asks = SimpleNamespace(get_draining_nodes=lambda: {"a": 0}) if there else SimpleNamespace()
    modules = {"ray": None, "ray._private": None, "ray._private.state": SimpleNamespace(state=asks)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    found = find_draining()
    assert (found() if found else None) == ({"a": 0} if there else None)
    monkeypatch.setitem(sys.modules, "ray._private.state", None)  # as where the module is not there
    assert find_draining() is None


def test_the_key_of_a_run_is_in_no_text_of_what_an_actor_is_given() -> None:
    assert "secret" not in str(AgentPlace("10.0.0.1:7", "secret", 1, "/work"))
