"""The names that other systems' users type lead to ductile's keys."""

from pathlib import Path

import pytest

from ductile.config.reading.docs import ROOTS
from ductile.config.reading.errors import ConfigError
from ductile.config.reading.foreign import FOREIGN, ours
from ductile.config.reading.key_tree import find
from ductile.config.reading.parse import parse
from ductile.config.schema.run import InferenceRunConfig, OrchestratorRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from tests.config.stories import furnish


@pytest.mark.parametrize("foreign", FOREIGN)
def test_each_name_leads_to_keys_that_there_are(foreign: str) -> None:
    for key in FOREIGN[foreign]:
        path = tuple(key.split("."))
        assert any(find(root, path) for _, root, _ in ROOTS), key
    assert ours(RLConfig, ("made", "up", *foreign.split("."))) is not None


SUGGESTED: list[tuple[type[Section], str, str]] = [
    (RLConfig, "--orchestrator.task.file", "--orchestrator.task.path"),
    (RLConfig, "--orchestrator.group", "--orchestrator.rollouts-per-example"),
    (RLConfig, "--optim.learning-rate", "--trainer.optim.lr"),
    (RLConfig, "--num_epochs", "--max-steps"),
    (RLConfig, "--nnodes", "--cluster.num-nodes"),
    (RLConfig, "--per_device_train_batch_size", "--orchestrator.batch-size"),
    (RLConfig, "--num-generations", "--orchestrator.rollouts-per-example"),
    (RLConfig, "--actor_rollout_ref.rollout.n", "--orchestrator.rollouts-per-example"),
    (RLConfig, "--actor_rollout_ref.actor.kl_loss_coef", "--trainer.loss.kl-coef"),
    (RLConfig, "--actor_rollout_ref.ref.megatron.tensor_model_parallel_size", "--scorer.tp"),
    (RLConfig, "--data.max_response_length", "--orchestrator.sampling.max-tokens"),
    (RLConfig, "--trainer.test_freq", "--orchestrator.eval.interval"),
    (SFTConfig, "--per_device_train_batch_size", "--data.batch-size"),
    (SFTConfig, "--max_seq_length", "--data.seq-len"),
    (SFTConfig, "--learning_rate", "--optim.lr"),
    (SFTConfig, "--dataset_name", "--data.path"),
    (TrainerRunConfig, "--max_grad_norm", "--optim.max-norm"),
    (OrchestratorRunConfig, "--num_generations", "--rollouts-per-example"),
    (RLConfig, "--trainer.optim.beta", "--trainer.optim.betas2"),  # a slip, not TRL's beta
    (RLConfig, "--beta", "--trainer.loss.kl-coef"),
    (InferenceRunConfig, "--max_model_len", "--model.max-model-len"),
    (InferenceRunConfig, "--served_model_name", "--server.served-model-name"),
    (InferenceRunConfig, "--vllm_gpu_memory_utilization", "--gpu-memory-utilization"),
    (RLConfig, "--gradient_checkpointing", "--trainer.model.ac"),
    (RLConfig, "--data.apply_chat_template_kwargs", "--model.chat-template-kwargs"),
]


@pytest.mark.parametrize(("root", "typed", "suggested"), SUGGESTED)
def test_a_foreign_name_is_refused_with_ours(
    root: type[Section], typed: str, suggested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    with pytest.raises(ConfigError) as caught:
        parse(root, [typed, "1"])
    what = next(problem.what for problem in caught.value.problems if problem.key == typed)
    assert what == f"does not exist. Did you mean {suggested}?"


@pytest.mark.parametrize(
    ("root", "typed", "suggested", "missing"),
    [
        (InferenceRunConfig, "--tensor_parallel_size", "--parallel.tp", "tensor-parallel generation"),
        (RLConfig, "--use_vllm", "--inference.engine", "engines of other systems"),
    ],
)
def test_a_foreign_name_of_what_is_not_built_is_refused_so(
    root: type[Section], typed: str, suggested: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    with pytest.raises(ConfigError) as caught:
        parse(root, [typed, "1"])
    what = next(problem.what for problem in caught.value.problems if problem.key == typed)
    assert what.startswith(f"does not exist. Did you mean {suggested}? Not built yet: {missing}")


def test_a_count_that_means_something_else_is_not_suggested() -> None:
    """TRL's num_iterations trains on a batch several times; n_minibatches cuts it."""
    assert ours(RLConfig, ("num_iterations",)) is None


def test_a_key_in_a_table_of_another_command_is_known_without_it() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean --registry\.type\?"):
        parse(InferenceRunConfig, ["--inference.registry.type", "file"])
