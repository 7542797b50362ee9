"""The check of `ductile orchestrator` tells of what our own server would refuse at the first request."""

from typing import Any

import pytest
from pydantic import ValidationError

from ductile.config.checks.preflight import warnings
from ductile.config.schema.run import OrchestratorRunConfig
from ductile.generator.server.openai_api import CompletionRequest


def is_refused(sampling: dict[str, Any]) -> bool:
    try:
        CompletionRequest.model_validate({"prompt": "x"} | sampling)
    except ValidationError:
        return True
    return False


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"stop": list("abcd"), "stop_token_ids": [1] * 128}, []),
        ({"stop": ["a" * 256]}, []),
        ({"stop": ["a"] * 65}, ["sampling.stop has 65 texts: `ductile inference` takes at most 64"]),
        (
            {"stop": ["a" * 257]},
            ["sampling.stop has 257 characters in one text: `ductile inference` takes at most 256"],
        ),
        (
            {"stop_token_ids": [1] * 129},
            ["sampling.stop_token_ids has 129 tokens: `ductile inference` takes at most 128"],
        ),
    ],
)
def test_check_tells_of_stops_that_our_server_refuses(sampling: dict[str, Any], said: list[str]) -> None:
    found = warnings(OrchestratorRunConfig.model_validate({"sampling": sampling}))
    about_stops = [remark for remark in found if "ductile inference" in remark]
    assert [remark.partition(" and refuses")[0] for remark in about_stops] == said
    assert is_refused(sampling) == bool(said)
