import asyncio

import pytest

from ductile.loop.episode import Episodes
from ductile.records import Generation, Prompt, Sampling
from ductile.roles import Task
from ductile.tasks.grader import Reply, Verdict
from ductile.tasks.tokenizer import Tokenizer
from tests.loop.doubles import InProcessGraders
from tests.tiny import IM_END, make_tokenizer_files


class Says:
    """A generator that has its answers ready: (text, ends with end-of-turn or not)."""

    capacity = 8

    def __init__(self, tokenizer, *answers, end=IM_END):
        self.tokenizer, self.answers, self.end, self.requests = tokenizer, list(answers), end, []

    async def generate(self, request):
        self.requests.append(request)
        text, finish = self.answers.pop(0)
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False)) + ((self.end,) if finish == "stop" else ())
        version = len(self.requests)
        return Generation(request.id, ids, (-0.5,) * len(ids), (version,) * len(ids), finish)

    async def receive(self, manifest):
        raise AssertionError


class Riddle(Task):
    name = "riddle"

    def __len__(self):
        return 1

    def messages(self, example):
        return [{"role": "user", "content": "?"}]

    def reply(self, example, messages):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        return None if said[-1] == "42" else [{"role": "user", "content": f"not {said[-1]}"}]

    def reward(self, example, answer):
        return float(answer == "42"), {"said": float(len(answer))}


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_folder(make_tokenizer_files(tmp_path))


def play(tokenizer, generators, task=None, max_len_tokens=1000, graders=None, sampling=None, **keys):
    tasks = {"train": task or Riddle()}
    episodes = Episodes(tasks, tokenizer, generators, graders or InProcessGraders(tasks), max_len_tokens)
    ids = tuple(tokenizer.apply_chat_template(tasks["train"].messages(0)))
    prompt = Prompt("train/0/0", "train", 0, ids)
    return prompt, asyncio.run(episodes.play(prompt, sampling or Sampling(), **keys))


def test_one_turn(tokenizer):
    _, rollout = play(tokenizer, Says(tokenizer, ("42", "stop")))
    assert rollout.token_ids == (*tokenizer.encode("42"), IM_END)
    assert rollout.mask == (True, True, True)
    assert rollout.reward == 1
    assert rollout.metrics == {"said": 2.0, "reward_error": 0.0}
    assert (rollout.num_turns, rollout.finish_reason) == (1, "stop")


def test_several_turns_train_on_the_policys_words_only(tokenizer):
    generators = Says(tokenizer, ("7", "stop"), ("42", "stop"))
    prompt, rollout = play(tokenizer, generators)
    text = tokenizer.decode(rollout.token_ids, skip_special_tokens=False)
    assert text == "7<|im_end|>\n<|im_start|>user\nnot 7<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    sampled = [token for token, trained in zip(rollout.token_ids, rollout.mask, strict=True) if trained]
    assert tokenizer.decode(sampled, skip_special_tokens=False) == "7<|im_end|>42<|im_end|>"
    assert [v for v, trained in zip(rollout.versions, rollout.mask, strict=True) if trained] == [1, 1, 2, 2, 2]
    assert {v for v, trained in zip(rollout.versions, rollout.mask, strict=True) if not trained} == {-1}
    assert {p for p, trained in zip(rollout.logprobs, rollout.mask, strict=True) if not trained} == {0.0}
    assert (rollout.num_turns, rollout.reward, rollout.oldest_version) == (2, 1.0, 1)
    # The second turn's prompt is the first one's with exactly what was sampled behind it.
    first, second = generators.requests
    assert second.prompt[: len(first.prompt) + 2] == first.prompt + tuple(sampled[:2])
    assert first.id != second.id
    assert first.group == second.group == prompt.id


def test_an_answer_cut_by_its_limit_ends_the_rollout(tokenizer):
    _, rollout = play(tokenizer, Says(tokenizer, ("7", "length")))
    assert (rollout.finish_reason, rollout.num_turns, rollout.reward) == ("length", 1, 0.0)


def test_the_whole_never_exceeds_the_limit(tokenizer):
    prompt, rollout = play(tokenizer, Says(tokenizer, ("7", "stop"), ("8", "stop"), ("9", "stop")), max_len_tokens=60)
    assert len(prompt.token_ids) + len(rollout.token_ids) <= 60
    assert rollout.finish_reason == "length"
    assert rollout.mask[-1], "the environment's last words are left out when nobody can answer them"


def test_a_turn_may_use_what_is_left(tokenizer):
    generators = Says(tokenizer, ("42", "stop"))
    prompt, _ = play(tokenizer, generators, max_len_tokens=50, sampling=Sampling(max_tokens=100))
    assert generators.requests[0].sampling.max_tokens == 50 - len(prompt.token_ids)


def test_seeds_differ_by_member_and_turn_and_are_the_same_again(tokenizer):
    def seeds(member):
        generators = Says(tokenizer, ("7", "stop"), ("42", "stop"))
        play(tokenizer, generators, sampling=Sampling(seed=5), member=member)
        return [request.sampling.seed for request in generators.requests]

    assert len({*seeds(0), *seeds(1)}) == 4
    assert seeds(0) == seeds(0)


class Failing:
    num_errors = 0

    def __init__(self, at):
        self.at = at

    async def reply(self, task, example, messages):
        return Reply(error="the reply took too long") if self.at == "reply" else Reply()

    async def reward(self, task, example, answer):
        return Verdict(error="the reward took too long") if self.at == "reward" else Verdict(1.0)


@pytest.mark.parametrize("at", ["reply", "reward"])
def test_a_failing_environment_scores_0(tokenizer, at):
    _, rollout = play(tokenizer, Says(tokenizer, ("7", "stop")), graders=Failing(at))
    assert rollout.reward == 0
    assert rollout.metrics["reward_error"] == 1


def test_a_request_is_named_by_prompt_member_and_turn(tokenizer):
    generators = Says(tokenizer, ("7", "stop"), ("42", "stop"))
    play(tokenizer, generators, member=3)
    assert [request.id for request in generators.requests] == ["train/0/0/3/0", "train/0/0/3/1"]
