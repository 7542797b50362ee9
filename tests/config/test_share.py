"""Shared keys reach their targets whatever the order of the rules."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ductile.config.reading.errors import ConfigError
from ductile.config.reading.key_tree import value_at
from ductile.config.reading.parse import parse
from ductile.config.reading.provenance import Draft, Origin
from ductile.config.reading.share import SHARED, share
from ductile.config.schema.model import ChatModelConfig
from ductile.config.schema.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, RunConfig, SFTConfig
from tests.config.stories import furnish
from tests.nightly import examples

RULES = SHARED[RLConfig]
PATHS = sorted({tuple(key.split(".")) for rule in RULES for key in (rule.key, *rule.targets)})


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Some of the shared keys and targets, with few values, so that they agree and contradict, from two sources."""
    draft = Draft()
    for path in PATHS:
        if draw(st.booleans()):
            draft.put(path, draw(st.sampled_from([True, 1, 2])), Origin("f", 1, draw(st.integers(0, 1))))
    return draft


@given(drafts(), st.permutations(RULES))
def test_the_order_of_the_rules_means_nothing(draft: Draft, rules: list) -> None:
    in_order, shuffled = share(RLConfig, draft), share(RLConfig, draft, rules)
    assert shuffled.draft.values == in_order.draft.values
    assert set(shuffled.problems) == set(in_order.problems)


@given(drafts())
def test_sharing_changes_nothing_that_was_given_by_a_source_as_strong(draft: Draft) -> None:
    shared = share(RLConfig, draft).draft
    for rule in RULES:
        source = tuple(rule.key.split("."))
        for target in (tuple(name.split(".")) for name in rule.targets):
            if draft.has(target) and draft.origin(target).layer >= draft.origin(source).layer:
                assert shared.get(target) == draft.get(target)


@given(drafts())
def test_sharing_twice_is_sharing_once(draft: Draft) -> None:
    once = share(RLConfig, draft)
    if not once.problems:
        assert share(RLConfig, once.draft).draft.values == once.draft.values


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(20))
@given(values=st.permutations([("max_steps", 3), ("trainer.max_steps", 4), ("orchestrator.max_steps", 5)]))
def test_the_order_in_a_file_means_nothing(values: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not Path("model").exists():
        furnish(tmp_path)
    Path("steps.toml").write_text("\n".join(f"{key} = {value}" for key, value in values))
    with pytest.raises(ConfigError) as error:
        parse(RLConfig, ["@", "good.toml", "@", "steps.toml"])
    assert sorted(problem.key for problem in error.value.problems) == ["--max-steps", "--max-steps"]


WRITTEN_OUT = "max_steps = 9\nseed = 1\ntrainer.max_steps = 9\norchestrator.max_steps = 9\ntrainer.seed = 1\n"
WRITTEN_OUT += "inference.seed = 5\ntrainer.model.seq_len = 64\norchestrator.sampling.stop = ['a']\n"
WRITTEN_OUT += "orchestrator.eval.sampling.stop = ['a']\nckpt.resume_step = 3\n"


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--max-steps 2", {"max_steps": 2, "trainer.max_steps": 2, "orchestrator.max_steps": 2}),
        ("--max-steps None", {"max_steps": None, "trainer.max_steps": None, "orchestrator.max_steps": None}),
        ("--seed 7", {"seed": 7, "trainer.seed": 7, "orchestrator.seed": 7, "inference.seed": 7}),
        ("@ later.toml", {"trainer.seed": 8, "orchestrator.seed": 8, "inference.seed": 8}),
        ("--seed 7 @ later.toml", {"trainer.seed": 7, "orchestrator.seed": 7, "inference.seed": 7}),
        ("--seed 7 --trainer.seed 3", {"trainer.seed": 3, "orchestrator.seed": 7, "inference.seed": 7}),
        ("--trainer.seed 3", {"trainer.seed": 3, "orchestrator.seed": 1, "inference.seed": 5}),
        ("--seq-len 512", {"trainer.model.seq_len": 512, "inference.model.max_model_len": 512}),
        ("--orchestrator.sampling.stop b", {"orchestrator.eval.sampling.stop": ["b"]}),
        ("--orchestrator.sampling.stop []", {"orchestrator.eval.sampling.stop": []}),
        ("--resume", {"ckpt.resume_step": -1}),
        ("--no-resume", {"ckpt.resume_step": None, "resume": False}),
        ("--resume --ckpt.resume-step 4", {"ckpt.resume_step": 4}),
    ],
)
def test_a_later_source_replaces_what_an_earlier_one_wrote_out(
    words: str, values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    Path("resolved.toml").write_text(WRITTEN_OUT)
    Path("later.toml").write_text("seed = 8\n")
    read = parse(RLConfig, ["@", "good.toml", "@", "resolved.toml", *words.split()])
    assert {key: value_at(read.config, tuple(key.split("."))) for key in values} == values


VARIABLES = "inference.model.chat_template_kwargs = { x = 1 }\n"
BOTH = VARIABLES + "model.chat_template_kwargs = { x = 1 }\n"


@pytest.mark.parametrize(
    ("written", "words", "variables"),
    [
        (VARIABLES, ["--model.chat-template-kwargs", "{}"], {}),
        (VARIABLES, ["--model.chat-template-kwargs", '{"y": false}'], {"y": False}),
        (VARIABLES, ["--model.chat-template-kwargs.y", "false"], {"y": False}),
        (BOTH, ["--model.chat-template-kwargs", "{}"], {}),
        (BOTH, ["--model.chat-template-kwargs", '{"y": false}'], {"y": False}),
        (BOTH, ["--model.chat-template-kwargs.y", "false"], {"x": 1, "y": False}),
    ],
)
def test_a_later_table_replaces_what_an_earlier_source_wrote_out(
    written: str, words: list[str], variables: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    Path("run.toml").write_text(written)
    config = parse(RLConfig, ["@", "good.toml", "@", "run.toml", *words]).config
    assert isinstance(config, RLConfig)
    assert config.inference.model.chat_template_kwargs == config.model.chat_template_kwargs == variables


def test_a_value_that_gives_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    Path("run.toml").write_text("trainer.model.seq_len = 64\n")
    derived = parse(RLConfig, ["@", "good.toml", "@", "run.toml", "--seq-len", "512"]).derived
    assert "trainer.model.seq_len = 512: from seq_len (command line), instead of 64 (run.toml:1)" in derived


SPELLINGS = [
    (RLConfig, "--model"),
    (RLConfig, "--inference.model"),
    (SFTConfig, "--model"),
    (OrchestratorRunConfig, "--model"),
    (InferenceRunConfig, "--model"),
]
EARLIER = [
    (RLConfig, "--tokenizer.chat-template", "--orchestrator.chat-template-kwargs"),
    (SFTConfig, "--tokenizer.chat-template", "--data.chat-template-kwargs"),
    (OrchestratorRunConfig, "--tokenizer.chat-template", "--chat-template-kwargs"),
]


@pytest.mark.parametrize(
    ("root", "template", "variables"),
    [*((root, f"{at}.chat-template", f"{at}.chat-template-kwargs") for root, at in SPELLINGS), *EARLIER],
)
def test_every_command_has_its_chat_template_in_the_model_that_makes_its_tokenizer(
    root: type[RunConfig], template: str, variables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    Path("chat.jinja").write_text("{{ messages }}")
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    files = {RLConfig: ["@", "good.toml"], SFTConfig: ["--data.path", "rows.jsonl"], InferenceRunConfig: []}
    asks = ["--client.base-url", "http://127.0.0.1:8000/v1", "--task.type", "builtin", "--task.name", "addition"]
    words = ["--model.name", "model", template, "chat.jinja", variables, '{"enable_thinking": false}']
    config = parse(root, [*files.get(root, asks), *words]).config
    model = config.inference.model if isinstance(config, RLConfig) else config.model
    assert isinstance(model, ChatModelConfig)
    assert (model.chat_template, model.chat_template_kwargs) == ("chat.jinja", {"enable_thinking": False})
