"""How large a load `ductile inference --bench` sends, and what it may not be."""

import pytest

from ductile.config.schema.bench import InferenceBenchConfig, Load, load_findings, load_of
from ductile.config.schema.inference import InferenceConfig


def config(max_model_len=2048, **keys):
    return InferenceConfig.model_validate({"model": {"max_model_len": max_model_len}, **keys})


@pytest.mark.parametrize(
    ("bench", "served", "load"),
    [
        ({}, config(), Load(64, 128, 64)),
        ({}, config(max_num_seqs=16), Load(16, 128, 64)),
        ({}, config(server={"max_connections": 8}), Load(8, 128, 64)),
        ({}, config(100), Load(64, 50, 50)),
        ({}, config(2), Load(64, 1, 1)),
        ({"prompt_tokens": 90}, config(100), Load(64, 90, 10)),
        ({"max_tokens": 90}, config(100), Load(64, 10, 90)),
        ({"num_requests": 3, "prompt_tokens": 7, "max_tokens": 9}, config(), Load(3, 7, 9)),
    ],
)
def test_what_is_not_written_fits(bench, served, load):
    asked = InferenceBenchConfig.model_validate(bench)
    assert load_of(asked, served) == load
    assert list(load_findings(asked, served)) == []


@pytest.mark.parametrize(
    ("bench", "key", "what"),
    [
        (
            {"prompt_tokens": 60, "max_tokens": 50},
            "bench.prompt_tokens",
            "must be at most 50: prompt and completion share",
        ),
        ({"max_tokens": 100}, "bench.max_tokens", "must be at most 99: prompt and completion share"),
        ({"prompt_tokens": 7, "max_tokens": 100}, "bench.prompt_tokens", "leaves no room"),
        ({"num_requests": 9}, "bench.num_requests", "must be at most server.max_connections (8): all are sent at once"),
    ],
)
def test_what_the_server_would_refuse(bench, key, what):
    (found,) = load_findings(InferenceBenchConfig.model_validate(bench), config(100, server={"max_connections": 8}))
    assert found.keys[0] == key
    assert found.what.startswith(what)
