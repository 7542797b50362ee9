"""Reward functions as users of other systems have them."""

import json
from pathlib import Path

import pytest

from ductile.config.checks.reward_signature import WrongSignature, reward_signature
from ductile.config.schema.orchestrator import ImportTask, JsonlTask
from ductile.records import Completion
from ductile.tasks.build import build_task
from ductile.tasks.jsonl import JsonlDataset, names_of
from ductile.tasks.task import TaskError, metrics_of, score

ROWS = [
    {"prompt": "2+2=", "solution": "4"},
    {"messages": [{"role": "user", "content": "2+2="}], "solution": "4"},
]
CODE = """
import asyncio

def exact(row, completion):
    return float(completion == row["solution"])

def brief(row, completion, num_tokens, finish_reason, *, num_turns=0):
    return -0.5 if finish_reason == "length" else 1 / (num_tokens * num_turns)

async def thinks(row, completion):
    await asyncio.sleep(0)
    return exact(row, completion), {"waited": 1.0}

def trl(prompts, completions, solution, **kwargs):
    assert len(prompts) == len(completions) == len(solution) == 1
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text == right) for text, right in zip(texts, solution)]

async def trl_async(completions, **kwargs):
    return [len(kwargs["completion_ids"][0]) / kwargs["num_tokens"][0]]

def not_for_me(completions, **kwargs):
    return [None]

def two(completions, **kwargs):
    return [1.0, 2.0]

def nothing(row, completion):
    pass
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(CODE)

    def make(*names, weights=None):
        rewards = [f"{tmp_path}/mine.py:{name}" for name in names]
        config = JsonlTask(path=f"{tmp_path}/rows.jsonl", reward=rewards if len(rewards) > 1 else rewards[0])
        return build_task(config.model_copy(update={"reward_weights": weights}))

    return make


FOUR = Completion("4", num_tokens=4, finish_reason="stop", num_turns=2, token_ids=(7, 8))


@pytest.mark.parametrize("example", [0, 1])
@pytest.mark.parametrize(
    ("names", "weights", "expected"),
    [
        (["exact"], None, (1.0, {})),
        (["exact"], [2.0], (2.0, {"exact": 1.0})),
        (["brief"], None, (0.125, {})),
        (["thinks"], None, (1.0, {"waited": 1.0})),
        (["trl"], None, (1.0, {})),
        (["trl_async"], None, (0.5, {})),
        (["exact", "brief"], [1.0, 0.2], (1.025, {"exact": 1.0, "brief": 0.125})),
        (["trl", "thinks", "not_for_me"], None, (2.0, {"trl": 1.0, "thinks": 1.0, "thinks/waited": 1.0})),
    ],
)
def test_a_reward_in_any_of_its_forms(task, example, names, weights, expected):
    assert score(task(*names, weights=weights), example, FOUR) == expected


def test_a_reward_sees_that_the_limit_was_hit(task):
    assert score(task("brief"), 0, Completion("4", 9, "length"))[0] == -0.5


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["nothing"], "returned None; it must return a finite number"),
        (["exact", "nothing"], "by nothing returned None; it must return a finite number"),
        (["two"], "by two returned [1.0, 2.0]; it must return a list with a number for each completion"),
        (["not_for_me", "not_for_me"], "returned None, from each of its functions"),
    ],
)
def test_what_is_no_reward(task, names, sentence):
    with pytest.raises(TaskError) as error:
        score(task(*names), 0, FOUR)
    assert str(error.value) == sentence


GOOD = [
    "True", "np.float32(1)", "np.int64(1)", "np.bool_(True)", "np.array(1.0)", "np.array([1])", "torch.tensor(1.0)",
    "torch.ones(1, 1, requires_grad=True)", "torch.tensor(True)", "decimal.Decimal('1')", "fractions.Fraction(1, 1)",
]  # fmt: skip
BAD = [
    "'1'", "b'1'", "1j", "np.complex64(1)", "torch.tensor(1j)", "None", "[1.0]", "{'score': 1.0}", "float('nan')",
    "np.float32('inf')", "10**400", "torch.tensor(float('nan'))", "np.ones(2)", "torch.ones(0)", "np.array('1')",
    "decimal.Decimal('sNaN')", "object()",
]  # fmt: skip


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A module whose functions return each of these, as a reward, a metric, and as TRL's lists do."""
    folder = tmp_path_factory.mktemp("numbers")
    functions = [
        f"def row_{n}(row, completion): return {value}\n"
        f"def metric_{n}(row, completion): return 0.5, {{'own': {value}}}\n"
        f"def lists_{n}(completions, **kwargs): return [{value}]"
        for n, value in enumerate([*GOOD, *BAD])
    ]
    imports = "import decimal, fractions\nimport numpy as np\nimport torch\n"
    (folder / "numbers_of.py").write_text(imports + "\n".join(functions))
    (folder / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")

    def make(*names):
        rewards = [f"{folder}/numbers_of.py:{name}" for name in names]
        return build_task(JsonlTask(path=f"{folder}/rows.jsonl", reward=rewards))

    return make


@pytest.mark.parametrize("n", range(len(GOOD)), ids=GOOD)
def test_a_number_is_one_whoever_made_it(numbers, n):
    assert score(numbers(f"row_{n}"), 0, FOUR) == (1.0, {})
    assert score(numbers(f"lists_{n}"), 0, FOUR) == (1.0, {})
    assert score(numbers(f"metric_{n}"), 0, FOUR) == (0.5, {"own": 1.0})
    both = score(numbers(f"row_{n}", f"metric_{n}"), 0, FOUR)
    assert both == (1.5, {f"row_{n}": 1.0, f"metric_{n}": 0.5, f"metric_{n}/own": 1.0})
    assert all(type(value) is float for value in (both[0], *both[1].values()))


@pytest.mark.parametrize("n", range(len(GOOD), len(GOOD) + len(BAD)), ids=BAD)
def test_what_is_no_number_is_refused_with_a_sentence(numbers, n):
    for names in ([f"row_{n}"], [f"row_{n}", "row_0"], [f"lists_{n}"]):
        if names[0].startswith("lists") and BAD[n - len(GOOD)] == "None":
            continue  # TRL's word for "this is not for me"
        with pytest.raises(TaskError, match=r"returned [\s\S]*; it must return a finite number$"):
            score(numbers(*names), 0, FOUR)


def test_a_metric_that_a_completion_does_not_have_costs_no_reward(tmp_path):
    assert metrics_of({"ratio": None, "length": 3}) == {"length": 3}


def test_metrics_have_names_of_their_own(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "mine.py").write_text(
        "def right(row, completion): return 0.5, {'right': 1, 'length': 3}\n"
        "def brief(row, completion): return 0.25, {'right': 7, 'length': 4}\n"
        "def twins(row, completion): return 1.0, {1: 1, '1': 2}\n"
        "def nameless(row, completion): return 1.0, {' ': 1}\n"
    )

    def scored(*names):
        rewards = [f"{tmp_path}/mine.py:{name}" for name in names]
        return score(build_task(JsonlTask(path=f"{tmp_path}/rows.jsonl", reward=rewards)), 0, FOUR)

    both = {"right": 0.5, "right/right": 1, "right/length": 3, "brief": 0.25, "brief/right": 7, "brief/length": 4}
    assert scored("right", "brief") == (0.75, both)
    assert scored("right") == (0.5, {"right/right": 1, "length": 3})
    for name in ("twins", "nameless"):
        with pytest.raises(TaskError, match="each must have a name of its own"):
            scored(name)


def test_tokens_travel_only_to_who_asks_for_them(task):
    tasks = {name: task(name) for name in ("exact", "trl", "trl_async")}
    assert all(isinstance(each, JsonlDataset) for each in tasks.values())
    assert [each.wants_token_ids for each in tasks.values()] == [False, True, True]


@pytest.mark.parametrize(
    ("function", "style", "by_name"),
    [
        (lambda row, completion: 0, "row", set()),
        (lambda line, text, finish_reason: 0, "row", {"finish_reason"}),
        (lambda row, completion, strict=True: 0, "row", set()),
        (lambda *both: 0, "row", set()),
        (lambda completions, **kwargs: 0, "lists", {"completions"}),
        (lambda completion_ids: 0, "lists", {"completion_ids"}),
        (max, "row", set()),
    ],
)
def test_signatures(function, style, by_name):
    signature = reward_signature(function)
    assert (signature.style, set(signature.by_name)) == (style, by_name)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda completion: 0,
            "takes (completion); it is called with (row, completion), or with lists by name when it asks for",
        ),
        (lambda: 0, "takes (); it is called with (row, completion)"),
        (
            lambda row, completion, solution: 0,
            "asks for `solution`; besides (row, completion) there are `num_tokens`, ",
        ),
    ],
)
def test_a_function_that_nobody_could_call(function, sentence):
    with pytest.raises(WrongSignature) as error:
        reward_signature(function)
    assert str(error.value).startswith(sentence)


def test_a_class_of_ones_own_may_be_async_and_ask_for_more(tmp_path):
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    name = 'own'\n"
        "    def __len__(self):\n        return 1\n"
        "    def messages(self, example):\n        return [{'role': 'user', 'content': '?'}]\n"
        "    async def reward(self, example, completion, num_turns):\n        return num_turns\n"
    )
    task = build_task(ImportTask(import_path=f"{tmp_path}/own.py:Own"))
    assert score(task, 0, FOUR) == (2.0, {})


@pytest.mark.parametrize(
    ("completion", "num_tokens", "reward"),
    [
        ("2+5=7 7-5=2 <answer>2</answer>", 20, 1.0),
        ("2+5=7 7-5=3 <answer>3</answer>", 20, 0.1),
        ("2", 1, 0.0),
        ("<answer>two</answer>", 42, -0.02),
    ],
)
def test_the_example_s_rewards_score_as_they_say(completion: str, num_tokens: int, reward: float) -> None:
    folder = Path(__file__).parents[2] / "examples/own_task"
    functions = [f"{folder}/reward.py:{name}" for name in ("correct", "brief")]
    task = build_task(JsonlTask(path=str(folder / "questions.jsonl"), reward=functions, reward_weights=[1.0, 0.2]))
    assert score(task, 0, Completion(completion, num_tokens))[0] == pytest.approx(reward)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["rewards.py:exact", "pkg.module.brief"], ["exact", "brief"]),
        (["a.py:style", "my/b.py:style", "pkg.c.style", "c.py:brief"], ["a.style", "b.style", "c.style", "brief"]),
        (["a.py:style", "a.py:style", "x/a.py:style"], ["a.style_1", "a.style_2", "a.style_3"]),
    ],
)
def test_functions_of_the_same_name_are_metrics_of_their_own(paths, names):
    assert names_of(paths) == names


def test_two_functions_of_one_name_overwrite_no_metric(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    for name, value in (("right", 1.0), ("brief", 0.5)):
        (tmp_path / f"{name}.py").write_text(f"def reward(row, completion):\n    return {value}\n")
    config = JsonlTask(path=f"{tmp_path}/rows.jsonl", reward=[f"{tmp_path}/{n}.py:reward" for n in ("right", "brief")])
    assert score(build_task(config), 0, FOUR) == (1.5, {"right.reward": 1.0, "brief.reward": 0.5})
