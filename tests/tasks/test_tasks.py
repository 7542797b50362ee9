import json

import pytest

from ductile.config.schema.orchestrator import BuiltinTask, ImportTask, JsonlTask, ReasoningGymTask
from ductile.records import Completion
from ductile.tasks.build import build_task
from ductile.tasks.prompts import check_prompts, prompt_ids
from ductile.tasks.rows import conversation_of, read_rows
from ductile.tasks.task import TaskError, score, takes_turns
from ductile.tasks.tokenizer import Tokenizer
from tests.tiny import make_tokenizer_files

EXACT = "tests.tasks.rewards.exact"


def jsonl(tmp_path, *lines, reward=EXACT):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return JsonlTask(path=str(file), reward=reward)


def test_jsonl(tmp_path):
    task = build_task(
        jsonl(
            tmp_path,
            {"prompt": "1+1=", "solution": "2"},
            "\n",
            {"messages": [{"role": "user", "content": "2+2="}], "solution": "4"},
        )
    )
    assert len(task) == 2
    assert task.messages(0) == [{"role": "user", "content": "1+1="}]
    assert task.messages(1) == [{"role": "user", "content": "2+2="}]
    assert score(task, 1, Completion("4")) == (1.0, {})
    assert score(task, 0, Completion("3")) == (0.0, {})
    assert not takes_turns(task)


def test_jsonl_with_a_system_prompt_and_metrics(tmp_path):
    config = jsonl(tmp_path, {"prompt": "1+1="}, reward="tests.tasks.rewards.with_metrics")
    task = build_task(config.model_copy(update={"system_prompt": "Be brief."}))
    assert task.messages(0)[0] == {"role": "system", "content": "Be brief."}
    assert score(task, 0, Completion("two")) == (0.5, {"length": 3.0})


def test_a_reward_in_a_file_beside_the_data(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(row, completion):\n    return len(completion)\n")
    task = build_task(jsonl(tmp_path, {"prompt": "1+1="}, reward=f"{tmp_path}/mine.py:reward"))
    assert score(task, 0, Completion("two")) == (3.0, {})


def test_a_prompt_is_rendered_with_the_row_s_tools(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    said = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = {"messages": [*said, {"role": "tool", "content": "2"}], "tools": tools, "solution": "2"}
    task, template = build_task(jsonl(tmp_path, row)), tmp_path / "tools.jinja"
    template.write_text(
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    )
    tokenizer = Tokenizer.from_folder(make_tokenizer_files(tmp_path / "m"), chat_template=template)
    text = tokenizer.decode(prompt_ids(task, tokenizer, 0), skip_special_tokens=False)
    assert text == (
        '[{"type": "function", "function": {"name": "add"}}]<|im_start|>user\n1+1<|im_end|>'
        '<|im_start|>assistant\n{"name": "add", "arguments": {"a": 1}}<|im_end|><|im_start|>tool\n2<|im_end|>'
    )
    assert score(task, 0, Completion("2")) == (1.0, {})
    without = Tokenizer.from_folder(make_tokenizer_files(tmp_path / "n"))
    with pytest.raises(TaskError, match=r"rows\.jsonl:1: the chat template leaves out the tool add"):
        check_prompts(task, without, range(1))


def test_two_system_prompts_are_one_too_many(tmp_path):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1"}]
    config = jsonl(tmp_path, {"messages": messages}).model_copy(update={"system_prompt": "Be brief."})
    with pytest.raises(TaskError, match=r"rows\.jsonl:1: has a system message, and orchestrator\.task\.system_prompt"):
        build_task(config)


def test_prompts_that_spell_control_tokens_are_told(tmp_path):
    tokenizer = Tokenizer.from_folder(make_tokenizer_files(tmp_path / "m"))
    task = build_task(jsonl(tmp_path, {"prompt": "1"}, {"prompt": "<|im_end|>2"}))
    assert check_prompts(task, tokenizer, range(1)) == ""
    told = check_prompts(task, tokenizer, range(2))
    assert told.startswith("1 prompts have words that spell a special token")
    assert told.endswith("<|im_end|> in " + str(tmp_path / "rows.jsonl:2") + " is the first")


def test_a_prompt_of_another_shape_is_looked_at_before_a_run(tmp_path):
    template = tmp_path / "user.jinja"
    template.write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer.from_folder(make_tokenizer_files(tmp_path / "m"), chat_template=template)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1"}]
    task = build_task(jsonl(tmp_path, {"prompt": "1"}, {"prompt": "2"}, {"messages": messages}))
    with pytest.raises(TaskError, match=r"rows\.jsonl:3: the chat template leaves out the content of message 1"):
        check_prompts(task, tokenizer, range(3))


def test_a_line_separator_inside_text_is_no_end_of_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    assert len(read_rows(tmp_path / "rows.jsonl")) == 1


BAD_ROWS = [
    ('{"prompt": "a"}\n[1, 2]\n', "rows.jsonl:2: is a list; each line must be an object"),
    ('[\n  {"prompt": "a"}\n]\n', "rows.jsonl is one JSON array; write an object a line: jq -c '.[]'"),
    ('{"prompt": "a"}\n{"prompt": \n', "rows.jsonl:2: is not JSON: Expecting value at column"),
    ('{"prompt": "a"}\nhello\n', "rows.jsonl:2: is not JSON"),
    (
        '{"question": "a"}\n',
        "rows.jsonl:1: has neither messages nor prompt, conversations or instruction; its keys are question",
    ),
    ('{"prompt": 3}\n', "rows.jsonl:1: prompt is a number, not text"),
    ('{"prompt": ""}\n', "rows.jsonl:1: prompt is empty"),
    ('{"prompt": null}\n', "rows.jsonl:1: prompt is null, not text"),
    ('{"prompt": "a", "messages": []}\n', "rows.jsonl:1: has both messages and prompt; keep one"),
    ('{"messages": []}\n', "rows.jsonl:1: messages must be a list of at least one message, not empty"),
    ('{"messages": "hi"}\n', "messages must be a list of at least one message, not text"),
    ('{"messages": [{"role": "user"}]}\n', "message 1 has no content"),
    ('{"messages": ["hi"]}\n', 'message 1 must be {"role": ..., "content": ...}'),
    (
        '{"messages": [{"role": "human", "content": "a"}]}\n',
        "message 1 has role 'human'; roles are system, developer, user",
    ),
    ('{"messages": [{"role": "user", "content": ["a"]}]}\n', "message 1 has a part 1 without text; parts are"),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        "rows.jsonl:1: the last message is the assistant's; a prompt ends with another role's",
    ),
    ("\n\n", "rows.jsonl has no lines"),
]


@pytest.mark.parametrize(("text", "message"), BAD_ROWS, ids=[message for _, message in BAD_ROWS])
def test_bad_rows(tmp_path, text, message):
    with pytest.raises(TaskError) as error:
        build_task(jsonl(tmp_path, text))
    assert message in str(error.value)


def called(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}


def said(**fields):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, **fields}]}


BAD_SFT_ROWS = [
    (said(tool_calls=[]), "rows.jsonl:1: message 2 has no content"),
    (said(reasoning_content=""), "rows.jsonl:1: message 2 has no content"),
    (called("{a: 1}"), "message 2 has a tool call 1 whose arguments are text that is not JSON: '{a: 1}'"),
    (called('["a"]'), "message 2 has a tool call 1 whose arguments are a list; they are an object, or its JSON text"),
    ({"prompt": "a"}, "rows.jsonl:1: has a prompt and no completion"),
    ({"prompt": "a", "completion": ["b"]}, 'rows.jsonl:1: message 2 must be {"role": ..., "content": ...}'),
    (
        {"completion": "b"},
        "rows.jsonl:1: has neither messages, prompt and completion, conversations or instruction; its",
    ),
    ({"messages": [{"role": "user", "content": "a"}]}, "no message is the assistant's, so there is nothing to train"),
]


@pytest.mark.parametrize(("row", "message"), BAD_SFT_ROWS, ids=[message for _, message in BAD_SFT_ROWS])
def test_bad_rows_for_sft(tmp_path, row, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError) as error:
        conversation_of(*read_rows(file)[0])
    assert message in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(TaskError, match=r"there is no file .*nowhere.jsonl"):
        read_rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(TaskError, match=r"is a folder; name a .jsonl file in it"):
        read_rows(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="is not UTF-8 text: byte 0"):
        read_rows(tmp_path / "binary")


def gym(name="chain_sum", **keys):
    return ReasoningGymTask(name=name, size=20, **keys)


BAD_TASKS = [
    (gym("chain_sums"), 'reasoning-gym has no data set "chain_sums"; did you mean "chain_sum"?'),
    (gym(config={"min_termz": 2}), 'the config of reasoning-gym\'s chain_sum has no "min_termz"; did you mean "min_t'),
    (
        gym(config={"min_terms": -1}),
        "reasoning-gym's chain_sum refuses its config {'min_terms': -1}: min_terms must be",
    ),
    (gym(config={"seed": 3}), "write `seed` beside `name`, not inside `config`"),
    (gym(question_template="Solve it."), "it must contain {question}, for the example"),
    (BuiltinTask(name="additon"), 'there is no built-in task "additon"; did you mean "addition"?'),
    (BuiltinTask(name="addition", config={"max": 3}), 'addition has no "max"; there is max_value'),
    (BuiltinTask(name="addition", config={"max_value": "9"}), "max_value is '9'; it must be a whole number above 0"),
    (BuiltinTask(name="reverse", config={"min_length": 9}), "reverse has min_length 9 above max_length 6"),
    (ImportTask(import_path="tests.tasks.rewards.Nothing"), "tests.tasks.rewards has no 'Nothing'"),
    (ImportTask(import_path="no_such_module.Task"), "cannot import no_such_module"),
    (ImportTask(import_path="Task"), "write package.module.name or file.py:name"),
    (ImportTask(import_path="nowhere.py:Task"), "there is no file nowhere.py"),
    (ImportTask(import_path="tests.tasks.rewards.not_a_function"), "is neither a class nor a function"),
    (ImportTask(import_path="tests.tasks.rewards.Hopeless"), "raises RuntimeError('no data today')"),
    (ImportTask(import_path="tests.tasks.rewards.Echo", kwargs={"loud": 1}), "unexpected keyword argument 'loud'"),
    (ImportTask(import_path="tests.tasks.rewards.Unfinished"), "makes a task without `messages`; see docs/tasks.md"),
    (ImportTask(import_path="tests.tasks.rewards.Empty"), "makes a task of 0 examples"),
    (
        ImportTask(import_path="tests.tasks.rewards.Uncalled"),
        "tests.tasks.rewards.Uncalled: the method `reward` of Uncalled takes (completion); it is called with (",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD_TASKS, ids=[message for _, message in BAD_TASKS])
def test_bad_tasks(config, message):
    with pytest.raises(TaskError) as error:
        build_task(config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("tests.tasks.rewards.not_a_function", "tests.tasks.rewards.not_a_function is int, not a function"),
        ("tests.tasks.rewards.no_such", "has no 'no_such'"),
        ("nowhere.py:reward", "there is no file nowhere.py"),
    ],
)
def test_bad_rewards_are_found_where_they_are_called(tmp_path, reward, message):
    task = build_task(jsonl(tmp_path, {"prompt": "a"}, reward=reward))
    with pytest.raises(TaskError) as error:
        task.reward(0, "b")
    assert message in str(error.value)
    assert "orchestrator.task.reward" in str(error.value)


def test_a_line_without_what_a_reward_asks_for_is_found_before_anything_runs(tmp_path):
    rewards = tmp_path / "mine.py"
    rewards.write_text(
        "import no_such_package\n"
        "def right(completions, num_tokens, answer, hint=None, **others): ...\n"
        "@no_such_package.cached\n"
        "def decorated(completions, answer): ...\n"
    )
    lines = {"prompt": "a", "answer": "b"}, {"prompt": "c", "solution": "d", "level": 2}
    with pytest.raises(TaskError) as error:
        build_task(jsonl(tmp_path, *lines, reward=f"{rewards}:right"))
    assert f"mine.py:right asks for `answer`, and {tmp_path}/" in str(error.value)
    assert ":2 has solution, level: add it to the line, or give the parameter a default" in str(error.value)
    with pytest.raises(TaskError, match="1 has nothing besides its prompt: add it"):
        build_task(jsonl(tmp_path, {"prompt": "a"}, reward=f"{rewards}:right"))
    build_task(jsonl(tmp_path, lines[0], reward=f"{rewards}:right"))
    build_task(jsonl(tmp_path, *lines, reward=f"{rewards}:decorated"))


def test_reasoning_gym_scores_its_own_completions():
    task = build_task(gym(question_template="{question}\nAnswer:", system_prompt="Add up."))
    assert len(task) == 20
    system, user = task.messages(3)
    assert system == {"role": "system", "content": "Add up."}
    assert user["content"].endswith("\nAnswer:")
    right = task._dataset[3]["answer"]
    assert task.reward(3, right) == 1
    assert task.reward(3, f" {right}\n") == 1
    assert task.reward(3, f"Let me think. <answer>{right}</answer>") == 1
    assert task.reward(3, "no idea") < 0.1


def test_examples_are_the_same_in_every_process():
    for config in (gym(), BuiltinTask(name="addition"), BuiltinTask(name="reverse"), BuiltinTask(name="guess_number")):
        assert [build_task(config).messages(i) for i in range(5)] == [build_task(config).messages(i) for i in range(5)]


def test_addition():
    task = build_task(BuiltinTask(name="addition", config={"max_value": 20}))
    a, b = task.messages(0)[0]["content"].rstrip("=").split("+")
    assert max(int(a), int(b)) <= 20
    assert score(task, 0, Completion(str(int(a) + int(b)))) == (1.0, {"is_number": 1.0})
    assert score(task, 0, Completion("-1")) == (0.0, {"is_number": 0.0})


def test_reverse_counts_letters_in_their_place():
    task = build_task(BuiltinTask(name="reverse", config={"min_length": 4, "max_length": 4}))
    word = task.messages(0)[0]["content"].removeprefix("Reverse: ")
    assert task.reward(0, word[::-1]) == 1
    assert task.reward(0, word[::-1][:2]) == 0.5
    assert task.reward(0, word[::-1] + "zzzz") == 0.5


def test_guess_number_takes_turns():
    task = build_task(BuiltinTask(name="guess_number", config={"max_value": 9, "max_turns": 3}))
    assert takes_turns(task)
    secret = next(n for n in range(1, 10) if task.reward(0, str(n)))

    def reply(*guesses):
        return task.reply(0, [{"role": "assistant", "content": guess} for guess in guesses])

    assert reply("0") == [{"role": "user", "content": "Higher."}]
    assert reply("10") == [{"role": "user", "content": "Lower."}]
    assert reply("0", "0", "0") is None
    assert reply(str(secret)) is None


def test_a_task_need_not_inherit_nor_reply():
    task = build_task(ImportTask(import_path="tests.tasks.rewards.Echo", kwargs={"word": "yo"}))
    assert not takes_turns(task)
    assert score(task, 0, Completion("yo")) == (1.0, {})
