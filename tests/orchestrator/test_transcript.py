from ductile.orchestrator.loop.transcript import transcript
from ductile.records import Rollout


class Letters:
    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(map(chr, token_ids))


def rollout(*turns: str) -> Rollout:
    ids = tuple(map(ord, "".join(turns)))
    mask = tuple(1 - number % 2 for number, turn in enumerate(turns) for _ in turn)
    return Rollout(ids, mask, (0.0,) * len(ids), (0,) * len(ids), "stop", 1.0)


def test_turns_do_not_run_together():
    assert transcript(Letters(), rollout("a guess", "\nnot that\n", "another")) == "a guess\nnot that\nanother"


def test_one_turn_is_as_it_was_said():
    assert transcript(Letters(), rollout("a completion\n")) == "a completion\n"
    assert transcript(Letters(), rollout()) == ""
