"""What a fleet releases for a change of roles, and what it says of what it could not."""

import pytest

from ductile.core.scheduling.orders import Release
from ductile.fleet.run_roles import RunRoles
from ductile.roles import Refused
from tests.core.scheduling.scenes import id_on
from tests.fleet.generate_slots import generator
from tests.fleet.test_migration import Cluster, order, steps, with_cluster


def fleet_of(cluster: Cluster) -> tuple[RunRoles, list[int], list[float]]:
    """The fleet, the tokens of caches that it was told of, and the seconds that generators took to end."""
    tokens, seconds = list[int](), list[float]()
    fleet = RunRoles(cluster.trainer, cluster.generators, None, {})
    fleet.on_migrated.add(lambda num_tokens, took_s: tokens.append(num_tokens))
    fleet.on_released.add(seconds.append)
    return fleet, tokens, seconds


def test_rollouts_migrate_and_then_their_generator_ends():
    async def story(cluster: Cluster):
        fleet, tokens, seconds = fleet_of(cluster)
        asked = [cluster.ask(name) for name in ("a", "b", "c")]
        await steps(5)
        release = Release((order("a", 0, 1, with_cache=True),), (generator(0),))
        assert await fleet.release(release) == []
        assert [each.id for each in fleet.instances] == [id_on(1), id_on(2)]
        assert cluster.where() == {"a": id_on(1), "b": id_on(1), "c": id_on(2)}
        assert tokens == [3 + 5], "the prompt and what was generated"
        assert len(seconds) == 1
        for task in asked:
            await task

    with_cluster(story)


def test_a_generator_whose_rollouts_stay_goes_on_and_the_others_end():
    async def story(cluster: Cluster):
        fleet, _, seconds = fleet_of(cluster)
        asked = [cluster.ask(name) for name in ("a", "b")]
        await steps(5)
        said = await fleet.release(Release((), (generator(0), generator(2))))
        assert said == ["generator-0 goes on generating: 1 of its rollouts could not migrate"]
        assert [each.id for each in fleet.instances] == [id_on(0), id_on(1)]
        assert len(seconds) == 1
        for task in asked:
            await task

    with_cluster(story)


def test_migrations_that_cannot_begin_are_told_and_what_can_end_does(monkeypatch: pytest.MonkeyPatch):
    async def story(cluster: Cluster):
        async def refuse(migrations):
            raise Refused("version 1 goes live")

        monkeypatch.setattr(cluster.generators, "migrate", refuse)
        fleet, tokens, _ = fleet_of(cluster)
        asked = cluster.ask("a")
        await steps(5)
        release = Release((order("a", 0, 1),), (generator(0), generator(2)))
        assert await fleet.release(release) == [
            "version 1 goes live",
            "generator-0 goes on generating: 1 of its rollouts could not migrate",
        ]
        assert [each.id for each in fleet.instances] == [id_on(0), id_on(1)]
        assert tokens == []
        await asked

    with_cluster(story)
