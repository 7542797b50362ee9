"""A deadline is a number of seconds, and says which key it comes from."""

import asyncio

import pytest

from ductile.concurrency.deadline import Deadline, said
from ductile.concurrency.read_write_lock import ReadWriteLock
from ductile.config.checks.preflight import warnings
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.run import RLConfig
from ductile.roles import Late
from ductile.transport.deadlines import Deadlines


def test_what_is_said_of_seconds_names_their_key():
    limit_s = Deadline(30, "trainer.resize.timeout_s")
    assert said(limit_s) == "30 s (trainer.resize.timeout_s)"
    assert said(limit_s + 1.0) == "31 s (trainer.resize.timeout_s)"
    assert said(2.0) == "2 s"
    assert limit_s / 2 == 15.0


def test_a_key_that_is_not_written_follows_from_the_commands_and_is_named_all_the_same():
    config = ClusterConfig(command_timeout_s=7.0, patience_timeout_s=5.0)
    deadlines = Deadlines.of(config)
    assert [
        said(each) for each in (deadlines.command_s, deadlines.progress_s, deadlines.patience_s, deadlines.group_s)
    ] == [
        "7 s (cluster.command_timeout_s)",
        "7 s (cluster.progress_timeout_s)",
        "5 s (cluster.patience_timeout_s)",
        "14 s (cluster.group_timeout_s)",
    ]


@pytest.mark.parametrize(("group_s", "warns"), [(None, False), (9.0, True), (40.0, False)])
def test_a_group_must_not_be_late_before_a_generator_that_hangs_is_replaced(group_s: float | None, warns: bool):
    cluster = {"command_timeout_s": 5.0, "progress_timeout_s": 20.0, "group_timeout_s": group_s}
    said = [each for each in warnings(RLConfig.model_validate({"cluster": cluster})) if "group_timeout_s" in each]
    assert bool(said) == warns
    assert all("replaced after 20 s" in each for each in said)


def test_who_waits_in_vain_reads_which_key_it_was():
    async def story():
        lock = ReadWriteLock(Deadline(0.01, "cluster.patience_timeout_s"))
        async with lock.exclusive("version 3 goes live"):
            with pytest.raises(Late, match=r"within 0.01 s \(cluster.patience_timeout_s\), because of this: version 3"):
                async with lock.shared("slot 1 joins"):
                    pass

    asyncio.run(story())
