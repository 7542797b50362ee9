"""What is wrong with the weights of a real `ductile inference` is named right, and told of that one alone."""

from pathlib import Path
from typing import Any

import pytest

from ductile.columns import TokenIds
from ductile.core.rollouts.provenance import LIMITS, KnownWeights, never_published
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.loop.canaries import Canaries
from ductile.sampling import Sampling
from tests.fleet.live.conftest import model, rig
from tests.fleet.live.rig import Rig

__all__ = ["model", "rig"]
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(180)]

TENSOR = "layers.1.mlp.down_proj.weight"
PROMPTS = [TokenIds(range(5, 25)), TokenIds(range(60, 80))]


class Checked:
    """The canaries of a run whose servers are the rig's."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self._rig, self._file = rig, folder / "events.jsonl"
        self.record = Recorder(folder)
        sampling = Sampling(temperature=0.7, seed=3)
        self._canaries = Canaries(PROMPTS, sampling, rig.generators, rig.trainer, LIMITS["float32"], self.record)

    async def publish(self) -> list[dict[str, Any]]:
        """A version, and what was told of it."""
        for _ in range(3):
            await self._rig.trainers.step()
        result, before = await self._rig.publish(), len(self._told())
        assert result is not None
        assert self._rig.health("b").instance in result.committed
        self._canaries.check_soon(KnownWeights(result.version, result.digest, result.tensors))
        assert self._canaries._checking is not None
        await self._canaries._checking
        return self._told()[before:]

    def _told(self) -> list[dict[str, Any]]:
        rows = read_jsonl(self._file) if self._file.exists() else []
        return [row for row in rows if row["kind"] in ("canary_disagreed", "canary_failed")]


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("unsent", "tensor_not_sent", f"{TENSOR} is still as in version"),
        ("negated", "wrong_weights", f"{TENSOR} is neither as published nor as in version"),
    ],
)
def test_each_fault_of_a_server_is_named(rig: Rig, tmp_path: Path, fault: str, kind: str, said: str) -> None:
    async def story() -> None:
        checked = Checked(rig, tmp_path)
        assert await checked.publish() == await checked.publish() == []
        rig.servers["b"].fault(fault, TENSOR)
        told = await checked.publish()
        assert [(row["instance"], row["diagnosis"]) for row in told] == [(rig.health("b").instance, kind)], told
        assert said in told[0]["sentence"]
        rig.servers["b"].clear()
        assert await checked.publish() == []
        checked.record.close()

    rig.run(story())


def test_tokens_of_what_was_never_published_are_known_by_what_a_server_says_of_them(rig: Rig) -> None:
    async def story() -> None:
        result = await rig.publish()
        assert result is not None
        digests = (await rig.ask(8)).digests
        assert digests == {rig.live: result.digest}
        assert never_published({rig.live: result.digest}, digests) == ""
        assert "which was never published" in never_published({rig.live - 1: result.digest}, digests)
        assert "was published as 00000000000000aa" in never_published({rig.live: "00000000000000aa"}, digests)

    rig.run(story())
