"""The example in docs/tasks.md is what it says: a task in twenty lines that works."""

import re
import tomllib
from pathlib import Path

from ductile.config.schema.orchestrator import ImportTask, JsonlTask
from ductile.records import Completion
from ductile.tasks.build import build_task
from ductile.tasks.task import score, takes_turns

DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"


def code_blocks():
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_task_of_the_docs(tmp_path):
    task_code, reply_code, *_ = code_blocks()
    assert len([line for line in task_code.splitlines() if line.strip()]) <= 20
    (tmp_path / "capitals.py").write_text(task_code)
    task = build_task(ImportTask(import_path=f"{tmp_path}/capitals.py:Capitals"))
    assert len(task) == 4
    assert score(task, 1, Completion("It is Tokyo.")) == (1.0, {"words": 3.0})
    assert not takes_turns(task)

    (tmp_path / "turns.py").write_text(task_code + "\n" + reply_code)
    task = build_task(ImportTask(import_path=f"{tmp_path}/turns.py:Capitals"))
    assert takes_turns(task)
    said = [*task.messages(1), {"role": "assistant", "content": "Kyoto"}]
    assert task.reply(1, said) == [{"role": "user", "content": "No. Try again."}]
    assert task.reply(1, [*said, {"role": "assistant", "content": "Tokyo"}]) is None


def test_the_rewards_of_the_docs(tmp_path):
    blocks = re.findall(r"```toml\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    toml = next(block for block in blocks if "jsonl" in block)
    row = re.search(r"```json\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    code = next(block for block in code_blocks() if "def correct" in block)
    (tmp_path / "rewards.py").write_text(code)
    (tmp_path / "train.jsonl").write_text(row[1])
    for name in ("rewards.py", "train.jsonl"):
        toml = toml.replace(name, f"{tmp_path}/{name}")
    config = tomllib.loads(toml)
    task = build_task(JsonlTask(**config["orchestrator"]["task"]))
    assert score(task, 0, Completion(" 42", num_tokens=500)) == (0.9, {"correct": 1.0, "in_time": -0.5})
    task = build_task(JsonlTask(path=f"{tmp_path}/train.jsonl", reward=f"{tmp_path}/rewards.py:trl_style"))
    assert score(task, 0, Completion("42")) == (1.0, {})
