import asyncio
import json

import pytest

from ductile.config.schema.inference import InferenceConfig, InferenceModelConfig
from ductile.config.schema.orchestrator import SamplingConfig, to_sampling
from ductile.generator.engine.engine import Engine
from ductile.model.checkpoint import load_model
from ductile.orchestrator.loop.episode import Episodes
from ductile.records import Generation, Prompt, Sampling
from ductile.roles import Task
from ductile.tasks.grader import Graded, TaskReply
from ductile.tasks.tokenizer import Tokenizer
from tests.orchestrator.doubles import InProcessGraders
from tests.tiny import IM_END, make_model_folder, make_tokenizer_files


class Says:
    """A generator that has its completions ready: (text, ends with end-of-turn or not)."""

    capacity = 8

    def __init__(self, tokenizer, *completions, end=IM_END):
        self.tokenizer, self.completions, self.end, self.requests = tokenizer, list(completions), end, []

    async def generate(self, request):
        self.requests.append(request)
        text, finish = self.completions.pop(0)
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

    def reward(self, example, completion):
        return float(completion == "42"), {"said": float(len(completion))}


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
    assert rollout.metrics == {"said": 2.0}
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


def test_a_completion_cut_by_its_limit_ends_the_rollout(tokenizer):
    _, rollout = play(tokenizer, Says(tokenizer, ("7", "length")))
    assert (rollout.finish_reason, rollout.num_turns, rollout.reward) == ("length", 1, 0.0)


def test_the_whole_never_exceeds_the_limit(tokenizer):
    prompt, rollout = play(tokenizer, Says(tokenizer, ("7", "stop"), ("8", "stop"), ("9", "stop")), max_len_tokens=60)
    assert len(prompt.token_ids) + len(rollout.token_ids) <= 60
    assert rollout.finish_reason == "length"
    assert rollout.mask[-1], "the environment's last words are left out when nobody can reply to them"


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
        return TaskReply(error="the reply took too long") if self.at == "reply" else TaskReply()

    async def reward(self, task, example, completion):
        return Graded(error="the reward took too long") if self.at == "reward" else Graded(1.0)


@pytest.mark.parametrize("at", ["reply", "reward"])
def test_what_a_failing_environment_says_is_no_reward(tokenizer, at):
    _, rollout = play(tokenizer, Says(tokenizer, ("7", "stop")), graders=Failing(at))
    assert rollout.reward is None
    assert rollout.error == f"the {at} took too long"


class Notes(Riddle):
    """Keeps what its reward is given."""

    def reply(self, example, messages):
        return None

    def reward(self, example, completion, num_tokens, finish_reason, num_turns):
        self.given = completion, num_tokens, finish_reason, num_turns
        return 1.0


@pytest.mark.parametrize(
    ("said", "finish", "given"),
    [("42\nQ:", "stop", "42\n"), ("42", "stop", "42"), ("Q:42\nQ:", "stop", ""), ("42\nQ:", "length", "42\nQ:")],
)
def test_the_reward_gets_the_length_and_not_the_stop_string(tokenizer, said, finish, given):
    task = Notes()
    generators = Says(tokenizer, (said, finish))
    _, rollout = play(tokenizer, generators, task, sampling=Sampling(stop=("Q:",)))
    assert task.given == (given, len(rollout.token_ids), finish, 1)


def test_a_request_is_named_by_prompt_member_and_turn(tokenizer):
    generators = Says(tokenizer, ("7", "stop"), ("42", "stop"))
    play(tokenizer, generators, member=3)
    assert [request.id for request in generators.requests] == ["train/0/0/3/0", "train/0/0/3/1"]


class EngineGenerators:
    """One real engine in this process that runs one sequence at a time."""

    def __init__(self, folder):
        settings = InferenceConfig(model=InferenceModelConfig(max_model_len=512), max_num_seqs=1)
        self.engine = Engine(load_model(folder), settings, (), lambda token_ids, skip_special_tokens: "")
        self.waiting, self.requests, self.order = {}, {}, []

    async def generate(self, request):
        self.engine.add(request)
        self.requests[request.id] = request
        self.waiting[request.id] = asyncio.get_running_loop().create_future()
        return await self.waiting[request.id]

    async def run(self):
        while True:
            for generation in self.engine.step():
                self.order.append(generation.id)
                self.waiting.pop(generation.id).set_result(generation)
            for _ in range(20):  # whoever has a completion asks for the next turn
                await asyncio.sleep(0)


class ThreeTurns(Riddle):
    def reply(self, example, messages):
        said = sum(message["role"] == "assistant" for message in messages)
        return None if said == 3 else [{"role": "user", "content": "and?"}]


def play_on_one_engine(tmp_path, tokenizer, *plays):
    """plays: (prompt id, members, priority). Names of the requests as they ended."""
    tasks = {"train": ThreeTurns()}
    generators = EngineGenerators(make_model_folder(tmp_path / "model"))
    episodes = Episodes(tasks, tokenizer, generators, InProcessGraders(tasks), 400)
    ids = tuple(tokenizer.apply_chat_template(tasks["train"].messages(0)))
    one_token = Sampling(max_tokens=4, stop_token_ids=tuple(range(102)))

    async def story():
        running = asyncio.create_task(generators.run())
        await asyncio.gather(
            *(
                episodes.play(Prompt(name, "train", 0, ids), one_token, member, priority)
                for name, members, priority in plays
                for member in range(members)
            )
        )
        running.cancel()

    asyncio.run(story())
    return generators


def test_more_finished_turns_go_first_and_then_more_finished_siblings(tmp_path, tokenizer):
    generators = play_on_one_engine(tmp_path, tokenizer, ("a", 2, 0), ("b", 2, 0))
    order = [name.rsplit("/", 1) for name in generators.order]
    rollouts = [name for name, turn in order if turn == "0"]
    assert order == [[name, turn] for name in rollouts for turn in "012"], "who has begun is finished first"
    assert rollouts[0] == "a/0"
    assert [generators.requests[f"a/0/{turn}"].num_turns for turn in range(3)] == [0, 1, 2]
    last = generators.requests[f"{rollouts[-1]}/2"].priority
    assert last == generators.requests["a/0/2"].priority + 1, "its sibling has finished"


def test_a_rollouts_own_priority_outweighs_turns(tmp_path, tokenizer):
    generators = play_on_one_engine(tmp_path, tokenizer, ("a", 2, 0), ("held out", 1, 1))
    assert generators.order[:3] == [f"held out/0/{turn}" for turn in range(3)]


def test_rewards_and_replies_are_given_the_turn_as_the_conversation_has_it(tmp_path):
    """Also where the template opens thoughts in the generation prompt, and its tags are special tokens."""
    folder = make_tokenizer_files(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    opens = settings["chat_template"].replace("assistant\\n' }}{% endif %}", "assistant\\n<|unk|>' }}{% endif %}")
    assert opens != settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": opens}))
    given = []

    class Asks(Riddle):
        def reply(self, example, messages):
            given.append(messages[-1]["content"])
            return None if len(messages) > 2 else [{"role": "user", "content": "again"}]

        def reward(self, example, completion, opened, token_ids):
            given.append((completion, opened, token_ids))
            return 0.0

    tokenizer = Tokenizer.from_folder(folder)
    play(
        tokenizer,
        Says(tokenizer, ("7<|pad|>", "stop"), ("8<|bos|>", "stop")),
        Asks(),
        sampling=to_sampling(SamplingConfig()),
    )
    ids = (*tokenizer.encode("8<|bos|>"), IM_END)
    assert given == ["<|unk|>7<|pad|>", "<|unk|>8<|bos|>", ("<|unk|>8<|bos|>", "<|unk|>", ids)]
