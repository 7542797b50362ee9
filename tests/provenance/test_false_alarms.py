"""Canaries of versions that arrive as they should: none is told of, however often."""

import pytest
import torch

from tests.provenance.rig import opened
from tests.tiny import make_model_folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_publishes", [3, pytest.param(1000, marks=[pytest.mark.fleet, pytest.mark.timeout(1800)])])
def test_no_alarm_is_false(tmp_path, dtype, num_publishes):
    model = make_model_folder(tmp_path / "model")
    for rig in opened(tmp_path, model, dtype=dtype, num_generators=1):
        first = {name: parameter.detach().clone() for name, parameter in rig.trainer.named_parameters()}

        def train(rig=rig, first=first):
            """Steps of all sizes, which together lead nowhere: weights that only grow are no model's."""
            size = (5e-4, 5e-3, 5e-2, 1e-1)[rig.version % 4]
            with torch.no_grad():
                for name, parameter in rig.trainer.named_parameters():
                    parameter.copy_(first[name] * (1 + torch.randn_like(parameter) * size))

        rig.train = train
        assert [told for _ in range(num_publishes) for told in rig.publish()] == []
        assert rig.canaries.num_checked == num_publishes
        assert rig.canaries.num_skipped == 0
