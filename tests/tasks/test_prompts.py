import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.tasks.prompts import ExampleOrder, PromptPosition, Prompts, pass_in_words, split
from ductile.tasks.task import TaskError
from tests.orchestrator.doubles import Count, Letters


def test_order_goes_through_all_examples_once_an_epoch():
    order = ExampleOrder(range(10), seed=3)
    first, second = ([order[epoch * 10 + i][1] for i in range(10)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [order[i] for i in (0, 10)] == [(0, first[0]), (1, second[0])]
    assert [ExampleOrder(range(10), seed=3)[i][1] for i in range(10)] == first


def test_order_without_shuffling():
    assert [ExampleOrder([7, 8, 9], shuffle=False)[i] for i in range(4)] == [(0, 7), (0, 8), (0, 9), (1, 7)]


def test_split_holds_out_the_last_ones():
    assert split(10, 3) == (range(7), range(7, 10))
    assert split(4, 3) == (range(1), range(1, 4))


@pytest.mark.parametrize(("num_examples", "instead"), [(3, 1), (8, 2), (0, 1)])
def test_a_split_that_leaves_nothing_to_train_on_names_the_key_and_what_to_write(num_examples, instead):
    with pytest.raises(TaskError, match=f"the task has {num_examples} examples.*eval.num-examples {instead}, or"):
        split(num_examples, 8)


@pytest.mark.parametrize(
    ("size", "num_steps", "step_size", "said"),
    [
        (10, 2, 5, ""),
        (7, 2, 5, "One pass is 2 steps of 5, and there are 7 samples: 3 of the last step are of a second pass."),
        (3, 1, 8, "One pass is 1 step of 8, and there are 3 samples: 5 of the last step are of further passes."),
        (7, 3, 2, "One pass is 3 steps of 2, and there are 7 samples: 1 of them is not taken."),
    ],
)
def test_a_pass_that_does_not_take_each_once_is_said(size, num_steps, step_size, said):
    assert pass_in_words(size, num_steps, step_size, "sample") == said


def test_an_order_needs_examples():
    with pytest.raises(TaskError, match="no examples to train on"):
        ExampleOrder(range(0))


def make(position=None, size=12, max_tokens=99, **keys):
    return Prompts(Count(size), Letters(), ExampleOrder(range(size), seed=1), max_tokens, position, **keys)


def test_an_id_names_epoch_and_example():
    prompts = make(size=1)
    assert [prompts.next_prompt().id for _ in range(2)] == ["train/0/0", "train/1/0"]


def test_what_was_under_way_is_asked_first():
    prompts = make()
    asked = [prompts.next_prompt() for _ in range(5)]
    for done in (asked[0], asked[3]):
        prompts.mark_trained(done)
    prompts.requeue(asked[4])
    assert prompts.position() == PromptPosition(5, (1, 2, 4))
    again = make(prompts.position())
    assert [again.next_prompt().id for _ in range(3)] == [asked[i].id for i in (1, 2, 4)]
    assert again.position() == prompts.position()


@given(st.lists(st.sampled_from(["ask", "learn", "give back", "restart"]), max_size=60), st.randoms())
def test_each_prompt_is_learned_once_an_epoch(moves, draw):
    prompts, under_way, trained = make(), [], []
    for move in moves:
        if move == "ask":
            under_way.append(prompts.next_prompt())
        elif move == "restart":
            prompts, under_way = make(prompts.position()), []
        elif under_way:
            prompt = under_way.pop(draw.randrange(len(under_way)))
            if move == "learn":
                prompts.mark_trained(prompt)
                trained.append(prompt.id)
            else:
                prompts.requeue(prompt)
    assert len(set(trained)) == len(trained)
    while len(trained) < 24:  # two epochs
        under_way.append(prompts.next_prompt())
        prompts.mark_trained(under_way[-1])
        trained.append(under_way.pop().id)
        if not draw.randrange(5):
            prompts, under_way = make(prompts.position()), []
    assert len(set(trained)) == len(trained)


def test_long_prompts_are_skipped_and_told():
    told = []
    prompts = make(size=12, max_tokens=1, on_too_long=told.append)
    asked = {prompts.next_prompt().example for _ in range(10)}
    assert asked == set(range(10))
    prompts.next_prompt()
    assert told[0] in {f"Skipped train/0/{i}: 2 tokens, at most 1 fit." for i in (10, 11)}


def test_nothing_but_long_prompts_is_an_error():
    with pytest.raises(TaskError, match="every prompt of count has more than 0 tokens; raise seq_len"):
        make(max_tokens=0).next_prompt()
