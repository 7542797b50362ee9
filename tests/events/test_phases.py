import pytest

from ductile.events.phases import EvaluatePhase, StepListener, StepListeners, WaitPhase


class Noting(StepListener):
    def __init__(self, name, heard):
        self.name, self.heard = name, heard

    def on_phase_begin(self, phase):
        self.heard.append(f"{self.name}: {phase.name} begins")

    def on_phase_end(self, phase):
        self.heard.append(f"{self.name}: {phase.name} ends")


def test_listeners_are_told_in_their_order_of_a_phase_that_fails_too():
    heard = []
    listeners = StepListeners(Noting("a", heard), Noting("b", heard))
    with pytest.raises(OSError, match="gone"), listeners.during(WaitPhase()):
        raise OSError("gone")
    assert heard == ["a: wait begins", "b: wait begins", "a: wait ends", "b: wait ends"]


def test_what_has_come_of_a_phase_is_there_when_it_ends():
    class Reads(StepListener):
        def on_phase_end(self, phase):
            self.metrics = phase.metrics

    reads = Reads()
    with StepListeners(reads).during(EvaluatePhase()) as phase:
        phase.metrics = {"eval_reward": 0.5}
    assert reads.metrics == {"eval_reward": 0.5}
