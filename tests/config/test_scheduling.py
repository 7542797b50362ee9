"""The keys of dynamic scheduling: the seeds' two examples as they are, and who decides."""

import sys
from pathlib import Path

import pytest

from ductile.cli import main
from ductile.config.checks.asked_placement import placement_of
from ductile.config.checks.asked_policy import policy_of, replaced_roles
from ductile.config.reading.errors import ConfigError
from ductile.config.reading.imports import ImportPathError
from ductile.config.reading.parse import parse
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.run import InferenceRunConfig, RLConfig, SFTConfig
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from ductile.core.scheduling.policies.static import InTurns, Static
from tests.config.stories import furnish

EXAMPLES = Path(__file__).parents[2] / "examples/scheduling"
SEED_DISAGGREGATED = """\
cluster:
  num_nodes: 1
  component_placement:
    rollout: 0-3
    inference: 4-5
    actor: 6-7
"""
SEED_DYNAMIC = """\
cluster:
  num_nodes: 1
  auto_scheduler: True
  use_pre_process_policy: True
  use_wait_before_last_iter_policy: False
  component_placement:
    actor: 0-1
    rollout: 2-5
    inference: 6-7
"""
MINE = """\
from ductile.core.scheduling.orders import Decision

class Mine:
    def decide(self, state):
        return Decision()

class Deaf:
    pass

class Curt:
    def decide(self):
        return Decision()

class Later:
    async def decide(self, state):
        return Decision()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "seed", "train", "generate", "score", "policy"),
    [
        ("disaggregated.yaml", SEED_DISAGGREGATED, (6, 7), (0, 1, 2, 3), (4, 5), Static()),
        ("dynamic.yaml", SEED_DYNAMIC, (0, 1), (2, 3, 4, 5), (6, 7), Model(wait_before_last_iter=False)),
    ],
)
@pytest.mark.parametrize("base", ["good.toml", "examples/quickstart/rl.toml"])
def test_the_seed_s_examples_run_unchanged(here, monkeypatch, capsys, base, file, seed, train, generate, score, policy):
    text = "".join(line for line in (EXAMPLES / file).read_text().splitlines(True) if not line.startswith("#"))
    assert text == seed
    if base.startswith("examples"):
        monkeypatch.chdir(EXAMPLES.parents[1])
    assert main(["check", "rl", "@", base, "@", str(EXAMPLES / file), "--output-dir", str(here / "out")]) == 0
    said = "policy    model, with pre-process, without wait before the last iteration: slots change roles"
    assert (said in capsys.readouterr().out) == (policy != Static())
    config = parse(RLConfig, ["@", base, "@", str(EXAMPLES / file)]).config
    assert config.cluster.auto_scheduler == (policy != Static())
    placement = placement_of(config)
    assert (placement.train, placement.generate, placement.score) == (train, generate, score)
    assert policy_of(config.cluster) == policy


@pytest.mark.parametrize(
    ("file", "policy"), [("disaggregated.yaml", ""), ("dynamic.yaml", "policy    model, with pre-process")]
)
def test_the_command_in_an_example_s_comment_does_what_the_comment_says(monkeypatch, capsys, file, policy) -> None:
    monkeypatch.chdir(EXAMPLES.parents[1])
    (command,) = [line for line in (EXAMPLES / file).read_text().splitlines() if line.startswith("#   ductile ")]
    assert main(["check", *command.split()[2:]]) == 0
    said = capsys.readouterr().out
    assert policy in said
    assert ("slots change roles" in said) == bool(policy)


@pytest.mark.parametrize(
    "placement", [{"rollout": "0-3", "actor": "4-5"}, {"inference": 0, "actor": 3, "rollout": "1-2"}]
)
def test_any_order_of_roles_is_scheduled_and_a_scorer_is_optional(here, placement) -> None:
    words = [
        word for role, slots in placement.items() for word in (f"--cluster.component-placement.{role}", str(slots))
    ]
    config = parse(RLConfig, ["@", "good.toml", "--cluster.auto-scheduler", *words]).config
    assert policy_of(config.cluster) == Model()


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ({}, Static()),
        ({"policy": "static"}, Static()),
        ({"auto_scheduler": True}, Model()),
        ({"auto_scheduler": True, "use_wait_before_last_iter_policy": True}, Model()),
        ({"auto_scheduler": True, "use_pre_process_policy": False}, Model(pre_process=False)),
        ({"auto_scheduler": True, "policy": "rules"}, Rules()),
        ({"auto_scheduler": True, "policy": "rules", "use_pre_process_policy": True}, Rules(True, False)),
        ({"auto_scheduler": True, "policy": "rules", "use_wait_before_last_iter_policy": True}, Rules(False, True)),
        ({"auto_scheduler": True, "policy": "model"}, Model()),
        ({"auto_scheduler": True, "policy": "static"}, Static()),
        ({"auto_scheduler": True, "policy": "in_turns"}, InTurns()),
    ],
)
def test_who_decides(keys, policy) -> None:
    assert policy_of(ClusterConfig(**keys)) == policy


@pytest.mark.parametrize("path", ["mine.Mine", "mine.py:Mine"])
def test_one_s_own_policy_is_imported(here, monkeypatch, path) -> None:
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test's folder
    config = parse(RLConfig, ["@", "good.toml", "--cluster.auto-scheduler", "--cluster.policy", path]).config
    assert type(policy_of(config.cluster)).__name__ == "Mine"


def test_a_file_that_changed_since_the_check_is_said(here) -> None:
    with pytest.raises(ImportPathError, match="no method decide"):
        policy_of(ClusterConfig(auto_scheduler=True, policy="mine.py:Deaf"))


SCHEDULED = ["--cluster.auto-scheduler"]


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["--cluster.policy", "modle", *SCHEDULED], "policy", 'write "model", "rules", "static", "in_turns" or the'),
        (["--cluster.policy", "modle", *SCHEDULED], "policy", "Did you mean model?"),
        (["--cluster.policy", "model"], "policy", "write auto_scheduler = true too"),
        (["--cluster.policy", "mine.py:Mine"], "policy", "write auto_scheduler = true too"),
        (["--cluster.use-pre-process-policy"], "use-pre-process-policy", "write auto_scheduler = true too"),
        (
            [*SCHEDULED, "--cluster.policy", "in_turns", "--cluster.use-wait-before-last-iter-policy"],
            "use-wait-before-last-iter-policy",
            'the policy is "in_turns": write policy = "model", or leave use_wait_before_last_iter_policy out',
        ),
        (["--cluster.enable-offload"], "enable-offload", "lends devices while slots change roles, which none does"),
        (
            ["--cluster.component-placement", '{"actor,rollout": "0-1"}', "--no-cluster.share-devices"],
            "share-devices",
            "the placement has actor and rollout share slots",
        ),
        (
            [*SCHEDULED, "--cluster.enable-offload", "--orchestrator.client.base-url", "http://there:8000/v1"],
            "enable-offload",
            "servers get weights from the trainer at any time",
        ),
        ([*SCHEDULED, "--cluster.policy", "nowhere.at.All"], "policy", "cannot import nowhere.at"),
        ([*SCHEDULED, "--cluster.policy", "mine.py:Yours"], "policy", "mine.py has no 'Yours'"),
        ([*SCHEDULED, "--cluster.policy", "mine.py:Deaf"], "policy", "has no method decide(self, state)"),
        ([*SCHEDULED, "--cluster.policy", "mine.py:Curt"], "policy", "has decide(self), and is called with one state"),
        ([*SCHEDULED, "--cluster.policy", "mine.py:Later"], "policy", "has an async decide, and is not awaited"),
        ([*SCHEDULED, "--cluster.policy", "json.dumps"], "policy", "A policy is a class with a method decide(self, st"),
        ([*SCHEDULED, "--cluster.policy", "mine.py:Mien"], "policy", "Did you mean Mine?"),
    ],
)
def test_keys_that_contradict_each_other_are_said(here, words, key, said) -> None:
    with pytest.raises(ConfigError) as error:
        parse(RLConfig, ["@", "good.toml", *words])
    (problem,) = error.value.problems
    assert problem.key == f"--cluster.{key}"
    assert said in problem.what
    assert repr(words[-1]) not in problem.what, "the key is told with its value"


@pytest.mark.parametrize(
    ("root", "words", "command"),
    [(SFTConfig, ["@", "sft.toml"], "sft"), (InferenceRunConfig, ["--model.name", "model"], "inference")],
)
@pytest.mark.parametrize("asked", [SCHEDULED, ["--cluster.policy", "rules"], ["--cluster.use-pre-process-policy"]])
def test_slots_with_one_role_are_not_scheduled(here, root, words, command, asked) -> None:
    with pytest.raises(ConfigError) as error:
        parse(root, [*words, *asked])
    (problem,) = error.value.problems
    assert f"the slots of `ductile {command}` have one role" in problem.what


@pytest.mark.parametrize(
    ("keys", "roles"),
    [
        ({}, set()),
        ({"auto_scheduler": True}, {"generate"}),
        ({"auto_scheduler": True, "policy": "my.Policy"}, {"generate"}),
        ({"auto_scheduler": True, "policy": "rules"}, set()),
    ],
)
def test_only_model_and_own_policies_make_other_slots_generate_for_one_that_is_given_back(keys, roles) -> None:
    assert replaced_roles(ClusterConfig(**keys)) == roles
