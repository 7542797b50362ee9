"""Keys of a fleet: none without a bound, and values that cannot work are refused with a sentence."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ductile.config.checks.fleet_findings import fleet_findings, registry_key_findings
from ductile.config.schema.fleet import FileRegistry, FleetConfig, HttpRegistry, RegistryConfig, StaticRegistry
from ductile.config.schema.orchestrator import ClientConfig
from ductile.messages.updates import LONGEST_LEASE_S

REFUSED = [
    ("health_check_interval_seconds", 0),
    ("health_check_interval_seconds", -1),
    ("health_check_interval_seconds", float("inf")),
    ("probe_timeout_seconds", 0),
    ("health_check_failure_threshold", 0),
    ("health_check_failure_threshold", -3),
    ("progress_timeout_seconds", 0),
    ("topology_change_cooldown_seconds", -0.1),
    ("min_healthy_servers", -1),
    ("drain_timeout_seconds", 0),
    ("max_rejoins", -1),
    ("flap_limit", 0),
    ("flap_window_seconds", 0),
    ("flap_backoff_seconds", 0),
    ("update_bucket_timeout_seconds", 0),
    ("update_total_timeout_seconds", None),
    ("update_total_timeout_seconds", LONGEST_LEASE_S + 1),  # a server keeps a version for a joiner so long
    ("update_max_attempts", 0),
    ("pipeline_slots", 0),
    ("bucket_bytes", 0),
    ("verify", "sha"),
    ("pause_mode", "hold"),
    ("join_transport", "nixl"),
    ("registry", {"type": "etcd"}),
    ("registry", {"type": "static", "urls": []}),
    ("registry", {"type": "file"}),
]
CANNOT_BE = [
    ({"probe_timeout_seconds": 5.0}, "inference.probe_timeout_seconds", "_seconds (5), or a hung server"),
    ({"health_check_interval_seconds": 1.0}, "inference.probe_timeout_seconds", "Write 0.8 or less, or a longer"),
    ({"update_bucket_timeout_seconds": 301.0}, "inference.update_bucket_timeout_seconds", "must be at most"),
    ({"flap_backoff_seconds": 601.0}, "inference.flap_backoff_seconds", "the longest quarantine"),
    ({"registry": {"type": "static", "urls": ["10.0.0.7:8000"]}}, "inference.registry.urls", "with http://"),
    ({"registry": {"type": "static", "urls": ["http://a:1", "http://a:1"]}}, "inference.registry.urls", "twice"),
    ({"registry": {"type": "static", "urls": ["http://me:pw@a:1"]}}, "inference.registry.urls", "user or a password"),
    ({"registry": {"type": "http", "url": "http://10.0.0.1:85"}}, "inference.registry.url", "token_var must name"),
    (
        {"registry": {"type": "http", "url": "http://127.0.0.1:85", "token_var": "DUCTILE_NOT_THERE"}},
        "inference.registry.token_var",
        "export DUCTILE_NOT_THERE=...",
    ),
    ({"registry": {"type": "custom", "import_path": "nowhere.at:all"}}, "inference.registry.import_path", ""),
]
AREAL = {
    "enable_health_monitor": False,
    "health_check_interval_seconds": 5.0,
    "health_check_failure_threshold": 3,
    "topology_change_cooldown_seconds": 30.0,
    "enable_topology_discovery": True,
}
"""AReaL's keys of a fleet, with its defaults."""


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_a_value_without_meaning_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        FleetConfig.model_validate({key: value})


@pytest.mark.parametrize(("given", "key", "words"), CANNOT_BE)
def test_values_that_cannot_work_together_are_findings(given: dict[str, Any], key: str, words: str) -> None:
    findings = list(fleet_findings(FleetConfig.model_validate(given), "inference."))
    assert [finding.keys[0] for finding in findings] == [key]
    assert words in findings[0].what


@pytest.mark.parametrize("token_var", [None, "REGISTRY_TOKEN"])
def test_an_api_key_goes_to_nobody_whom_a_registry_without_a_token_lists(token_var: str | None) -> None:
    registry = HttpRegistry(url="http://127.0.0.1:85", token_var=token_var)
    client = ClientConfig(api_key="s3cret-s3cret")
    found = list(registry_key_findings(registry, "inference.registry", client, "orchestrator.client"))
    assert [each.keys[0] for each in found] == ([] if token_var else ["inference.registry.token_var"])
    assert not list(registry_key_findings(registry, "inference.registry", ClientConfig(), "orchestrator.client"))


def test_defaults_are_finite_and_work() -> None:
    config = FleetConfig()
    assert not list(fleet_findings(config, "inference."))
    given = {name: value for name, value in config.model_dump().items() if name != "registry"}
    assert None not in given.values()


def test_keys_of_areal_work_as_they_are_by_default() -> None:
    config = FleetConfig.model_validate(AREAL)
    assert not list(fleet_findings(config, "inference."))
    assert config.detection_bound_s == 3 * 5 + config.probe_timeout_seconds


def test_silence_can_be_found_in_under_two_seconds() -> None:
    keys = {"health_check_interval_seconds": 0.5, "health_check_failure_threshold": 2, "probe_timeout_seconds": 0.4}
    config = FleetConfig.model_validate(keys)
    assert not list(fleet_findings(config, "inference."))
    assert config.detection_bound_s == pytest.approx(1.4)


def test_a_registry_is_told_by_its_type() -> None:
    read = TypeAdapter[Any](RegistryConfig).validate_python
    assert isinstance(read({"type": "file", "folder": "/tmp/x"}), FileRegistry)
    assert isinstance(read({"type": "static", "urls": ["http://a:1"]}), StaticRegistry)
