"""Which servers `ductile inference` starts, where, and with what."""

from typing import Any

import pytest

from ductile.config.checks.serving_plan import planned_servers, router_of, router_port
from ductile.config.schema.cluster import VllmRouter
from ductile.config.schema.run import InferenceRunConfig
from ductile.orchestrator.commands.server_processes import server_environment, server_settings


def config_of(**keys: Any) -> InferenceRunConfig:
    return InferenceRunConfig.model_validate({"model": {"name": "m"}, **keys})


APART = {
    "type": "disaggregated",
    "num_decode_replicas": 2,
    "prefill_vllm_overrides": {"max_num_batched_tokens": 4096},
    "decode_env_overrides": {"OMP_NUM_THREADS": "2"},
}


@pytest.mark.parametrize(
    ("keys", "has_router", "servers"),
    [
        ({}, False, [("any", 8100)]),
        ({"parallel": {"dp": 2}}, True, [("any", 8100), ("any", 8101)]),
        ({"deployment": {"type": "single_node", "router": {"type": "vllm-router"}}}, True, [("any", 8100)]),
        (
            {"parallel": {"dp": 2}, "deployment": {"type": "single_node", "backend_port": 0}},
            True,
            [("any", 0), ("any", 0)],
        ),
        ({"deployment": APART}, True, [("prefill", 8100), ("decode", 8200), ("decode", 8201)]),
    ],
)
def test_servers(keys: dict[str, Any], has_router: bool, servers: list[tuple[str, int]]) -> None:
    config = config_of(**keys)
    assert (router_of(config) is not None) is has_router
    planned = planned_servers(config)
    assert [(each.role, each.port) for each in planned] == servers
    assert [each.number for each in planned] == list(range(len(servers)))


def test_each_server_has_its_own_settings() -> None:
    config = config_of(deployment=APART, server={"port": 9000, "api_key": "12345678"}, max_num_batched_tokens=256)
    prefill, decode, other = (server_settings(config, each) for each in planned_servers(config))
    assert prefill["max_num_batched_tokens"] == 4096
    assert decode["max_num_batched_tokens"] == other["max_num_batched_tokens"] == 256
    settings = InferenceRunConfig.model_validate(decode)
    assert (settings.server.port, settings.server.api_key, settings.deployment.type) == (
        8200,
        "12345678",
        "single_node",
    )
    assert router_of(settings) is None
    assert router_port(config, VllmRouter()) == 9000
    assert router_port(config, VllmRouter(port=7000)) == 7000


@pytest.mark.parametrize(
    ("device", "environment", "devices"),
    [
        ("cpu", {}, [None, None, None]),
        ("auto", {}, ["0", "1", "2"]),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "4,6,7"}, ["4", "6", "7"]),
    ],
)
def test_each_server_has_its_own_device(device: str, environment: dict[str, str], devices: list[str | None]) -> None:
    planned = planned_servers(config_of(deployment=APART))
    found = [server_environment(each, device, environment | {"HOME": "/h"}) for each in planned]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == devices
    assert [each.get("OMP_NUM_THREADS") for each in found] == [None, "2", "2"]
    assert {each["HOME"] for each in found} == {"/h"}
