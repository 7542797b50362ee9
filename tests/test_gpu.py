"""Each role on one CUDA device says what it says on a CPU, and states move between slots that share the device."""

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ductile
from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.trainer import AdamWConfig, SFTLoss, TrainerConfig
from ductile.core.batch.loss_aggregation import loss_denominator
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.generator.engine.engine import Engine
from ductile.generator.generate_role import load_engine
from ductile.kernels import float8, plain
from ductile.kernels.device import peak_memory, peak_of
from ductile.kernels.flex_attention import FlexAttention
from ductile.kernels.varlen_attention import why_not_paged
from ductile.messages.outgoing_updates import BeginUpdate, FinishUpdate
from ductile.messages.updates import WeightUpdate
from ductile.messages.workers import Publish, Receive, Score
from ductile.model.attention import PackedAttention
from ductile.parallel.gathered import full
from ductile.parallel.parallel_context import ParallelContext
from ductile.roles import RoleAssignment
from ductile.scorer.score_role import ScoreRole
from ductile.trainer import outgoing_weights, own_weights
from ductile.trainer.joint_publisher import JointPublisher
from ductile.trainer.state import named_gradient, named_state, parts_of
from ductile.trainer.train_role import TrainRole
from ductile.trainer.trainer import Trainer
from ductile.weights.shared_memory import SharedMemory
from tests.generator.conftest import request, run
from tests.ranks import run_alone
from tests.resharding.world import run_world
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet
from tests.trainer.naive import NaiveTrainer, make_samples
from tests.weights.memory_sender import MemorySender

GPU = "cuda:0"
PROMPTS = ("hello", "a", "what is 1 + 2? " * 5, "x" * 33)
LENGTHS = ((20, 3, 9), (31, 8), (17, 5, 2, 26))
"""Of the samples of three optimizer steps."""

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def fp32(folder: Path, **sections: Any) -> TrainerConfig:
    model = {"name": str(folder), "compute_dtype": "float32"}
    return TrainerConfig.model_validate({"model": model, "matmul_precision": "highest", **sections})


def engine_on(device: str, folder: Path, block_size: int = 16, **model: Any) -> Engine:
    model = {"name": str(folder), "max_model_len": 256, **model}
    settings = {"model": model, "num_blocks": 4096 // block_size, "block_size": block_size}
    return load_engine(InferenceConfig.model_validate(settings), device)


def test_the_generator_draws_the_same_greedy_tokens(folder: Path) -> None:
    asked = [request(str(index), prompt, 24) for index, prompt in enumerate(PROMPTS)]
    here, there = (run(engine_on(device, folder, dtype="float32"), asked) for device in (GPU, "cpu"))
    for id, generation in there.items():
        assert here[id].token_ids == generation.token_ids
        assert here[id].logprobs == pytest.approx(generation.logprobs, abs=1e-3)


def test_the_generator_samples_in_bf16(folder: Path) -> None:
    asked = [request(str(index), prompt, 24, temperature=1.0, seed=index) for index, prompt in enumerate(PROMPTS)]
    engines = [engine_on(GPU, folder) for _ in range(2)]  # two, as one would find prompts in its cache the second time
    assert next(engines[0].model.parameters()).dtype == torch.bfloat16
    first, again = (run(engine, asked) for engine in engines)
    assert {id: done.token_ids for id, done in first.items()} == {id: done.token_ids for id, done in again.items()}


def decoded(engine: Engine) -> tuple[int, int]:
    """Decode steps that were captured, and that were replayed. Raises where the engine has given graphs up."""
    runner = engine._decode_runner
    assert runner is not None
    assert runner.why_off == ""
    return runner.num_recorded, runner.num_replayed


def test_cuda_graphs_decode_what_eager_steps_do(folder: Path) -> None:
    """Five sequences become one, the longest outgrow the first table. Twice: the second time graphs are there."""
    prompts = zip((*PROMPTS, "xyz"), (8, 16, 110, 70, 150), strict=True)
    asked = [request(str(place), prompt, num) for place, (prompt, num) in enumerate(prompts)]
    eager = engine_on(GPU, folder, dtype="float32", enforce_eager=True)
    assert eager._decode_runner is None
    graphs = engine_on(GPU, folder, dtype="float32")
    expected = run(eager, asked)
    for _ in range(2):
        found = run(graphs, asked)
        for id, generation in expected.items():
            assert found[id].token_ids == generation.token_ids
            assert found[id].logprobs == pytest.approx(generation.logprobs, abs=1e-3)
    num_recorded, num_replayed = decoded(graphs)
    assert num_recorded <= 6
    assert num_replayed > 250


@pytest.mark.parametrize("block_size", [16, 256])
def test_cuda_graphs_decode_in_bf16_also_where_the_cache_is_read_in_place(folder: Path, block_size: int) -> None:
    """Each against the model's own log-probs of what was generated, as tokens that are close may come out otherwise."""
    engine = engine_on(GPU, folder, block_size=block_size)
    asked = [request(str(place), prompt, 100, temperature=1.0, seed=place) for place, prompt in enumerate(PROMPTS)]
    done = run(engine, asked)
    assert decoded(engine)[1] > 90
    runner = engine._decode_runner
    assert runner is not None
    in_place = runner.why_gathered == ""
    assert in_place == (block_size == 256 and why_not_paged(torch.bfloat16, 16, (9, 0), 256) == "")
    for one in asked:
        tokens = [*one.prompt, *done[one.id].token_ids]
        logits = engine.model(
            torch.tensor(tokens, device=GPU), torch.arange(len(tokens), device=GPU), PackedAttention([len(tokens)])
        )
        expected = logits.float().log_softmax(-1)[len(one.prompt) - 1 : -1].cpu()
        chosen = expected.gather(1, torch.tensor(list(done[one.id].token_ids))[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(list(done[one.id].logprobs)), chosen, rtol=0.05, atol=0.05)


def test_cuda_graphs_read_new_weights_in_place_and_follow_those_that_move(folder: Path) -> None:
    engines = [engine_on(GPU, folder, dtype="float32", enforce_eager=eager) for eager in (False, True)]
    found: list[list[tuple[int, ...]]] = []
    for engine in engines:
        said: list[tuple[int, ...]] = []
        places = [{name: each.data for name, each in engine.weights()}]
        places.append({name: torch.empty_like(each) for name, each in places[0].items()})
        for version in range(1, 5):
            news = {name: each * (1 + 0.3 * version) for name, each in places[0].items()}
            if version == 1:
                engine.load_weights(news, version)
            else:
                for name, room in places[(version + 1) % 2].items():
                    room.copy_(news[name])
                engine.swap_weights(places[(version + 1) % 2], version)
            said.append(run(engine, [request("r", "what is 1 + 2?", 30)])["r"].token_ids)
        found.append(said)
    assert found[0] == found[1]
    assert decoded(engines[0])[0] == 2, "one shape in two places"


def test_products_of_8_bits_are_those_of_the_same_arithmetic_in_fp32() -> None:
    if why := float8.why_unavailable(torch.bfloat16, torch.cuda.get_device_capability()):
        pytest.skip(why)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=generator) for shape in ((37, 64), (96, 64), (37, 96))]
    results: list[list[torch.Tensor]] = []
    for device in (GPU, "cpu"):
        x, weight, grad = (each.to(device, torch.bfloat16) for each in given)
        inputs = x.requires_grad_(), weight.requires_grad_()
        out = float8.linear(*inputs)
        results.append([each.float().cpu() for each in (out, *torch.autograd.grad(out, inputs, grad))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-1)


def test_a_trainer_multiplies_by_8_bits(tmp_path: Path) -> None:
    if why := float8.why_unavailable(torch.bfloat16, torch.cuda.get_device_capability()):
        pytest.skip(why)
    folder = make_model_folder(tmp_path, hidden_size=64, intermediate_size=96, head_dim=16)
    losses: list[list[float]] = []
    for fp8 in (False, True):
        model = {"name": str(folder), "compute_dtype": "bfloat16", "fp8": fp8}
        config = TrainerConfig.model_validate({"model": model, "loss": SFTLoss(), "optim": AdamWConfig(lr=1e-3)})
        losses.append(run_alone(three_steps, config.model_dump())[0])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_published_weights_are_what_both_devices_sample_from(folder: Path) -> None:
    """From tensors on the GPU, through memory of this host, onto the GPU and the CPU."""
    publisher = SharedMemory()
    source = engine_on(GPU, folder, dtype="float32").model
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.1)
    manifest = publisher.publish(7, source.named_parameters())
    engines = [engine_on(device, folder, dtype="float32") for device in (GPU, "cpu")]
    for engine in engines:
        engine.load_weights(SharedMemory().receive(manifest), 7)
        for name, parameter in engine.model.named_parameters():
            assert torch.equal(parameter.cpu(), dict(source.named_parameters())[name].cpu()), name
    here, there = (run(engine, [request("a", "hello", 12)])["a"] for engine in engines)
    assert here.token_ids == there.token_ids
    assert set(here.versions) == {7}
    publisher.close()


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_rank_on_a_gpu_writes_what_it_would_gather(folder: Path, compute_dtype: str) -> None:
    """In pieces of a few rows, which are converted on the GPU."""
    trainer = Trainer(
        TrainerConfig.model_validate({"model": {"name": str(folder), "compute_dtype": compute_dtype}}),
        ParallelContext(Groups(0, 0, GPU, HashStore(), 60.0), ParallelLayout.of((0,))),
        GPU,
    )
    publisher, memory = JointPublisher(), SharedMemory()
    with patch.object(own_weights, "GPU_PIECE_BYTES", 1000):
        joint = publisher.publish(1, trainer, parts_of(named_state(trainer)))
    assert joint is not None
    gathered = memory.publish(1, trainer.publish_weights())
    assert replace(joint, location="") == replace(gathered, location="")
    publisher.close()
    memory.close()


def test_the_scorer_says_the_same(folder: Path) -> None:
    samples = tuple(make_samples((12, 30, 3, 7, 7), temperatures=(1.0, 0.5)))
    config = fp32(folder).model_dump()
    here, there = (
        ScoreRole(config, RoleAssignment(0, ParallelLayout.of((0,)), 0, device, instance=device))
        for device in (GPU, "cpu")
    )
    publisher = SharedMemory()
    manifest = publisher.publish(1, ((name, p * 1.1) for name, p in there._policy.named_parameters()))
    for model in ("policy", "reference"):
        found, expected = (role.handle(Score(samples, model)).logprobs for role in (here, there))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
        for role in (here, there):
            role.handle(Receive("score", manifest))
    publisher.close()


def three_steps(settings: dict[str, Any]) -> tuple[list[float], dict[str, list], float, float | None]:
    trainer = Trainer(
        TrainerConfig.model_validate(settings),
        ParallelContext(Groups(0, 0, GPU, HashStore(), 60.0), ParallelLayout.of((0,))),
        GPU,
    )
    losses, flops, peak = list[float](), 0.0, None
    for step, of_step in enumerate(LENGTHS):
        samples = make_samples(of_step, seed=step)
        trainer.forward_backward(pack(samples, 1, 40)[0])
        report = trainer.optim_step(loss_denominator(samples))
        losses.append(report.loss)
        flops, peak = report.flops, report.peak_flops_per_s
    return losses, {name: tensor.tolist() for name, tensor in trainer.publish_weights()}, flops, peak


def test_three_steps_of_the_trainer_are_those_of_torch_on_a_cpu(folder: Path) -> None:
    optim = AdamWConfig(lr=1e-2, betas1=0.8, betas2=0.9, eps=1e-4, weight_decay=0.1, max_norm=0.5)
    naive = NaiveTrainer(
        folder, SFTLoss(), torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1
    )  # fmt: skip
    expected = [naive.step(make_samples(n, seed=step), optim.max_norm) for step, n in enumerate(LENGTHS)]
    settings = fp32(folder, optim=optim, loss=SFTLoss()).model_dump()
    losses, tensors, flops, peak = run_alone(three_steps, settings)
    assert losses == pytest.approx(expected, rel=1e-3)
    for name, parameter in naive.model.named_parameters():
        torch.testing.assert_close(torch.tensor(tensors[name]), parameter.detach(), rtol=1e-2, atol=1e-3)
    assert flops > 0
    assert peak is None or peak > 1e12


KNOBS: dict[str, dict[str, Any]] = {
    "ac": {"ac": {}},
    "selective ac": {"ac": {"mode": "selective", "targets": ["norm", "attn_proj", "mlp"]}},
    "one activation in flight": {"ac_offloading": {"max_inflight_activations": 1}},
    "five in flight, with ac": {"ac": {}, "ac_offloading": {}},
    "pageable host memory": {"ac_offloading": {"pin_memory": False}},
    "optim_cpu_offload": {"optim_cpu_offload": True},
    "fsdp_cpu_offload": {"fsdp_cpu_offload": True},
    "compile": {"compile": {}},
    "compile, with ac and one activation in flight": {
        "compile": {}, "ac": {}, "ac_offloading": {"max_inflight_activations": 1},
    },
}  # fmt: skip


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_changes_nothing_that_is_computed(folder: Path, knob: str) -> None:
    """Attention's gradients are summed in no fixed order on a GPU, so not every bit is the same."""
    plain = fp32(folder, loss=SFTLoss(), optim=AdamWConfig(lr=1e-2)).model_dump()
    losses, tensors, _, _ = run_alone(three_steps, plain)
    with_knob = {**plain, "model": plain["model"] | KNOBS[knob]}
    ours, our_tensors, _, _ = run_alone(three_steps, with_knob)
    assert ours == pytest.approx(losses, rel=1e-4)
    for name, expected in tensors.items():
        torch.testing.assert_close(torch.tensor(our_tensors[name]), torch.tensor(expected), rtol=1e-3, atol=1e-4)


def test_flex_attention_is_what_a_cpu_runs() -> None:
    """Of two batches of uneven lengths, which share prompts."""
    for stems, branches in (([40, 0, 20], [[30, 7], [5, 9], []]), ([150, 33], [[20, 20], []])):
        trees = PackedAttention(stems, branches).trees
        given = [torch.randn(trees[-1].end, num, 16) for num in (4, 2, 2, 4)]
        there = [each.to(GPU).requires_grad_() for each in given[:3]]
        out = FlexAttention(trees, torch.device(GPU))(*there)
        found = out, *torch.autograd.grad(out, there, given[3].to(GPU))
        here = [each.requires_grad_() for each in given[:3]]
        expected = plain.attention(trees, *here)
        for ours, theirs in zip(found, (expected, *torch.autograd.grad(expected, here, given[3])), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("knob", ["optim_cpu_offload", "fsdp_cpu_offload"])
def test_a_state_in_host_memory_goes_to_other_slots_of_the_device(folder: Path, knob: str) -> None:
    settings = fp32(folder, loss=SFTLoss(), optim=AdamWConfig(lr=1e-2)).model_dump()
    settings["model"] |= KNOBS[knob]
    with Fleet(settings, range(3), GPU) as fleet:
        fleet.assign((0, 1))
        fleet.forward_backward(make_samples((9, 14, 5), seed=1))
        fleet.resize(ParallelLayout.of((2, 1)))
        devices = fleet.call((2, 1), devices_of_moments)
        assert {*devices.values()} == {"cpu"}
        assert fleet.optim_step(20.0).step == 1


def devices_of_moments(role: TrainRole) -> str:
    assert role._instance is not None
    (device,) = {tensor.device.type for name, tensor in role._instance.state.items() if not name.startswith("model/")}
    return device


def test_the_device_is_known_or_measured() -> None:
    peak = peak_of(GPU, "bfloat16", measure=True)
    assert peak is not None
    assert peak.flops_per_s > 1e12
    block = torch.ones(1 << 20, device=GPU)
    assert peak_memory(GPU).used_bytes >= block.nbytes


def rows_become_columns(rank: int) -> str:
    torch.cuda.set_device(0)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh=[0, 1])
    whole = torch.arange(48.0).view(8, 6)
    rows = DTensor.from_local(whole.chunk(2)[rank].to(GPU), mesh, [Shard(0)])
    columns = DTensor.from_local(torch.zeros(8, 3, device=GPU), mesh, [Shard(1)])
    report = ductile.reshard({"weight": rows}, {"weight": columns}, timeout_s=20.0)
    assert torch.equal(columns.to_local().cpu(), whole.chunk(2, dim=1)[rank])
    dist.barrier()
    return report.carrier


def test_a_state_is_resharded_between_processes_on_the_device() -> None:
    carriers = run_world(2, rows_become_columns)
    assert carriers[0] == carriers[1]


def whole_state(role: TrainRole) -> dict[str, Any]:
    """Every tensor of the state and of the gradient, gathered, as bytes."""
    trainer = role._instance.trainer
    named = named_state(trainer) | named_gradient(trainer)
    return {name: full(tensor).cpu().numpy().tobytes() for name, tensor in named.items()}


def test_a_trainer_goes_to_other_slots_on_the_device(folder: Path) -> None:
    """In the middle of a batch: to more slots, to fewer, to others."""
    settings = fp32(folder, loss=SFTLoss(), optim=AdamWConfig(lr=1e-2)).model_dump()
    with Fleet(settings, range(3), GPU) as fleet:
        fleet.assign((0, 1))
        for step, after in enumerate(
            (ParallelLayout.of((0, 1, 2)), ParallelLayout.of((0,)), ParallelLayout.of((2, 1)))
        ):
            fleet.forward_backward(make_samples((9, 14, 5), seed=step))
            before = fleet.call(fleet.layout.slots, whole_state)
            expected = before[fleet.layout.slots[0]]
            fleet.resize(after)
            for have in fleet.call(after.slots, whole_state).values():
                assert [name for name in expected if have[name] != expected[name]] == []
            assert fleet.optim_step(20.0).step == step + 1


def test_a_rank_sends_from_the_gpu_what_it_publishes(folder: Path) -> None:
    config = TrainerConfig.model_validate({"model": {"name": str(folder), "compute_dtype": "bfloat16"}})
    told: queue.Queue[Any] = queue.Queue()
    place = RoleAssignment(0, ParallelLayout.of((0,)), 0, GPU, tell=told.put)
    with patch.object(outgoing_weights, "WeightSender", MemorySender):
        role = TrainRole(config.model_dump(), place)
        manifest = role.handle(Publish(1)).manifest
        for version, base in ((1, None), (2, 1)):
            update = WeightUpdate(f"u{version}", 1, version, (), 3000, base_version=base)
            role.handle(BeginUpdate(update))
            report = told.get(timeout=20).report
            role.handle(FinishUpdate(update.update_id, False))
            assert (report.digest, report.failed) == (manifest.digest, {})
        assert report.num_bytes == 0, "nothing has changed"
        role.close()
