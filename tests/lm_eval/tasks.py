"""Two tasks of lm-eval's over rows of our own: choices, of which the likeliest counts, and texts to go on with."""

import json
import random
from pathlib import Path

NUM_CHOICES, NUM_TEXTS = 200, 50
CHOICES, TEXTS = "ductile_choices", "ductile_texts"
SEED = 11

THINGS = {
    "a dog": "an animal",
    "a rose": "a plant",
    "a hammer": "a tool",
    "Rome": "a city",
    "the Rhine": "a river",
    "iron": "a metal",
    "Tuesday": "a day",
    "violet": "a colour",
}
SIGNS = ("🙂", "é", "日本", "→", "½", "Ω")
"""Some of them are several tokens, of which none is a character."""

TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
num_fewshot: 0
doc_to_text: "{{{{question}}}}"
{keys}metadata: {{version: 1}}
"""
OF_CHOICES = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
"""
OF_TEXTS = """output_type: generate_until
doc_to_target: answer
generation_kwargs: {until: ["\\n\\n", "Question:", "🙂"], do_sample: false, max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""


def write_tasks(folder: Path) -> None:
    """Write a YAML and a JSONL file for each task."""
    for name, keys, rows in ((CHOICES, OF_CHOICES, choices()), (TEXTS, OF_TEXTS, texts())):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, rows=path, keys=keys))


def choices() -> list[dict[str, object]]:
    """Return sums, kinds of things, and signs to copy, with three choices each."""
    chance = random.Random(SEED)
    rows: list[dict[str, object]] = []
    for number in range(NUM_CHOICES):
        if number % 3 == 0:
            a, b = chance.randint(2, 60), chance.randint(2, 60)
            question, right = f"Question: What is {a} plus {b}?\nAnswer:", str(a + b)
            wrong = [str(a + b + off) for off in chance.sample((-10, -3, -1, 2, 7, 11), 2)]
        elif number % 3 == 1:
            thing = chance.choice(list(THINGS))
            question, right = f"{thing[0].upper()}{thing[1:]} is", THINGS[thing]
            wrong = chance.sample([kind for kind in THINGS.values() if kind != right], 2)
        else:
            sign = chance.choice(SIGNS)
            question, right = f"Repeat the sign: {sign} {sign} {sign}", sign
            wrong = chance.sample([other for other in SIGNS if other != sign], 2)
        answers = chance.sample([right, *wrong], 3)
        rows.append({"question": question, "choices": answers, "label": answers.index(right)})
    return rows


def texts() -> list[dict[str, object]]:
    chance = random.Random(SEED)
    kinds = ("Question: Why is {} useful?\nAnswer:", "Here is a short story about {}:", "Three facts about {}:\n1.")
    things = ["rain", "a lamp", "paper", "the moon", *THINGS]
    return [{"question": chance.choice(kinds).format(chance.choice(things)), "answer": ""} for _ in range(NUM_TEXTS)]
