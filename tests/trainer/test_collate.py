import pytest
import torch

from ductile.records import MicroBatch, Sample
from ductile.trainer.collate import collate


def test_trained_tokens_of_all_samples_in_order() -> None:
    one = Sample((5, 6, 7), (False, True, False), rollout_logprobs=(0.0, -1.0, -2.0), advantages=(0.0, 0.5, 0.0))
    nothing = Sample((9, 9), (False, False))
    other = Sample((8, 4), (False, True), weights=(0.25, 0.25), old_logprobs=(0.0, -3.0), temperature=0.5)
    batch = collate(MicroBatch((one, nothing, other)))
    assert batch.num_trained == 2
    assert batch.packed.token_ids.tolist() == [5, 8]  # what no trained token sees is not run
    assert batch.packed.targets.tolist() == [6, 4]
    assert batch.packed.temperatures is not None
    assert batch.packed.temperatures.tolist() == [1.0, 0.5]
    assert batch.weights.tolist() == [1.0, 0.25]
    inputs = batch.loss_inputs(torch.zeros(2), torch.ones(2))
    assert (inputs.logprobs.tolist(), inputs.entropies.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert inputs.rollout_logprobs.tolist() == [-1.0, 0.0]
    assert inputs.old_logprobs.tolist() == [-1.0, -3.0]  # the generator's, where the scorer was not asked
    assert inputs.reference is None  # the loss has not asked for it
    assert inputs.advantages.tolist() == [0.5, 0.0]
    assert inputs.sequences.tolist() == [0, 1]


@pytest.mark.parametrize("micro_batch", [MicroBatch(()), MicroBatch((Sample((1, 2), (False, False)),))])
def test_an_empty_turn_has_one_made_up_token(micro_batch: MicroBatch) -> None:
    batch = collate(micro_batch, required=("rollout_logprobs",))
    assert batch.num_trained == 0
    sequences = batch.loss_inputs(torch.zeros(1), torch.zeros(1)).sequences
    assert len(batch.packed.targets) == len(batch.weights) == len(sequences) == 1


def test_temperatures_are_left_out_where_they_do_nothing() -> None:
    assert collate(MicroBatch((Sample((1, 2), (False, True)),))).packed.temperatures is None


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample((1, 2), (True, True)), "sample 0 trains on its first token"),
        (
            Sample((1, 2), (False, True), advantages=(0.0, 1.0)),
            "sample 0 has no rollout_logprobs, which the configured loss",
        ),
        (
            Sample((1, 2), (False, True), rollout_logprobs=(0.0, float("-inf"))),
            "sample 0 has rollout_logprobs that are not finite",
        ),
        (
            Sample((1, 2), (False, True), rollout_logprobs=(0.0, 1e39)),
            "sample 0 has rollout_logprobs that are not finite",
        ),
        (
            Sample((1, 2), (False, True), rollout_logprobs=(0.0, 0.0), weights=(0.0, float("nan"))),
            "weights that are not finite",
        ),
        (Sample((1, 2), (False, True), rollout_logprobs=(0.0, 0.0), temperature=0.0), "sample 0 has temperature 0.0"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(sample: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate(MicroBatch((sample,)), required=("rollout_logprobs",))


def test_int64_even_for_one_token() -> None:
    assert collate(MicroBatch(())).packed.token_ids.dtype == torch.int64
