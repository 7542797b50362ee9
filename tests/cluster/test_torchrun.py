"""What the environment of torchrun's processes says, and what follows for a command line."""

import io

import pytest

from ductile.cluster.torchrun import BadLaunch, Kept, Rank, leave
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig, SFTConfig

GIVEN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job/7", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip


def rank_of(**changes: str) -> Rank:
    rank = Rank.of({**GIVEN, **changes})
    assert rank is not None
    return rank


@pytest.mark.parametrize(
    "changes", [{"WORLD_SIZE": "1"}, {"LOCAL_RANK": ""}, {"RANK": "first"}], ids=["alone", "no local rank", "no number"]
)
def test_what_is_not_of_torchrun_is_left_alone(changes: dict[str, str]) -> None:
    assert Rank.of({**GIVEN, **changes}) is None


def words(*given: str, size: int = 4, local: int = 4) -> str:
    config = parse(SFTConfig, [*given, "--data.path", "x"], across=False).config
    return " ".join(rank_of(WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{local}").words(config))


@pytest.mark.parametrize(
    ("given", "follows"),
    [
        ([], "--cluster.interface 127.0.0.1 --deployment.num-gpus 4"),
        (["--cluster.interface", "lo"], "--deployment.num-gpus 4"),
        (["--deployment.num-gpus", "4"], "--cluster.interface 127.0.0.1"),
        (["--cluster.component-placement", '{"actor": "0-3"}'], "--cluster.interface 127.0.0.1"),
    ],
)
def test_each_rank_is_a_node_of_one_slot(given: list[str], follows: str) -> None:
    assert words(*given) == f"--cluster.num-nodes 4 --deployment.gpus-per-node 1 --cluster.max-restarts 0 {follows}"


def test_between_machines_nothing_is_on_loopback() -> None:
    assert "--cluster.interface" not in words(local=2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--deployment.num-gpus", "8"], "deployment.num_gpus asks for 8 slots, and torchrun has started 4 ranks"),
        (["--cluster.component-placement", '{"actor": "0-1"}'], "cluster.component_placement asks for 2 slots"),
        (["--cluster.num-nodes", "2"], "cluster.num_nodes is 2, and torchrun has started 4 ranks"),
        (["--bench", "{}"], "a benchmark has a folder of its own"),
        (["--ray", "{}"], "[ray] has Ray start the nodes"),
    ],
)
def test_what_contradicts_torchrun_is_refused(given: list[str], says: str) -> None:
    with pytest.raises(BadLaunch) as raised:
        words(*given)
    assert str(raised.value).startswith(says)


def test_rl_is_for_its_own_launcher() -> None:
    with pytest.raises(BadLaunch, match="torchrun launches `ductile sft` and `ductile trainer`"):
        rank_of().words(RLConfig())


@pytest.mark.parametrize(
    ("shown", "num_gpus", "left"), [(None, 0, None), (None, 8, "1"), ("4,6", 2, "6"), ("GPU-a,GPU-b", 2, "GPU-b")]
)
def test_slots_inherit_one_gpu_and_nothing_of_torchrun(shown: str | None, num_gpus: int, left: str | None) -> None:
    environment = {**GIVEN, "PATH": "/bin", **({"CUDA_VISIBLE_DEVICES": shown} if shown else {})}
    leave(environment, rank_of(), num_gpus)
    assert environment == {"PATH": "/bin", **({"CUDA_VISIBLE_DEVICES": left} if left else {})}


def test_logs_have_a_folder_for_each_rank_and_attempt() -> None:
    assert str(rank_of().logs("runs/x")) == "runs/x/logs/trainer/torchrun/job_7/attempt_0/3"


class Stays(io.StringIO):
    def close(self) -> None:
        pass


def test_what_was_said_before_there_was_a_file_is_in_it() -> None:
    console, file, files = io.StringIO(), Stays(), list[io.StringIO]()
    stream = Kept(console, lambda: files[0] if files else None)
    print("early", file=stream)
    files.append(file)
    print("late", file=stream)
    assert console.getvalue() == file.getvalue() == "early\nlate\n"
