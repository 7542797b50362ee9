"""What micro-steps cost: the same batch sent row by row, two on their way, and as one command for all of it.

    python benchmarks/micro_steps.py [--slots 2] [--rows 24] [--hidden 128] [--rounds 7] [--json F]

Real slots, a made-up model. Both ways alternate, and each is timed `--rounds` times. `ratio` is that of the medians,
`ratio_of_min` that of the fastest rounds, which other load on the machine changes least.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fleet.assign_role import assign_role
from ductile.fleet.remote_trainer import RemoteTrainer
from ductile.messages.workers import ForwardBackward, ForwardBackwardDone
from ductile.orchestrator.commands.sft_data import fake_samples
from ductile.transport.deadlines import Deadlines
from ductile.transport.fanout import ask_each
from provenance import provenance, write

VOCAB_SIZE, SEQ_LEN, DEADLINE_S = 512, 128, 120.0


def model_config(hidden: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": SEQ_LEN, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip


async def measure(slots: int, rows: int, hidden: int, rounds: int, folder: Path) -> dict[str, float]:
    (folder / "config.json").write_text(json.dumps(model_config(hidden)))
    model = {"name": str(folder), "seq_len": SEQ_LEN, "debug": {"random_init": True}}
    config = TrainerConfig.model_validate({"model": model, "loss": {"type": "sft"}})
    samples = fake_samples(slots * rows, SEQ_LEN, VOCAB_SIZE, step=0, random_ids=True)
    members = tuple(range(slots))
    async with LocalCluster(members, ClusterConfig(device="cpu"), folder) as cluster:
        settings = config.model_dump(mode="json")
        layout = ParallelLayout.of(members)
        await assign_role(cluster.mailbox, "train", settings, [layout], DEADLINE_S, cluster.rendezvous)
        trainer = RemoteTrainer(cluster.mailbox, layout, Deadlines.same(DEADLINE_S))

        async def at_once() -> None:
            packed = pack(samples, slots, SEQ_LEN)
            commands = {slot: ForwardBackward(tuple(packed[slot])) for slot in members}
            await ask_each(cluster.mailbox, commands, DEADLINE_S, ForwardBackwardDone)

        async def row_by_row() -> None:
            await trainer.forward_backward(samples, SEQ_LEN)

        times: dict[str, list[float]] = {"at_once": [], "row_by_row": []}
        for number in range(rounds + 1):
            for name, way in (("at_once", at_once), ("row_by_row", row_by_row)):
                began_s = time.perf_counter()
                await way()
                if number:  # the first round warms up
                    times[name].append(time.perf_counter() - began_s)
            await trainer.optim_step(1.0)
    medians = {f"{name}_s": statistics.median(seconds) for name, seconds in times.items()}
    return {
        **medians,
        "micro_step_s": medians["row_by_row_s"] / rows,
        "ratio": medians["row_by_row_s"] / medians["at_once_s"],
        "ratio_of_min": min(times["row_by_row"]) / min(times["at_once"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results = []
    for hidden in asked.hidden:
        with tempfile.TemporaryDirectory() as folder:
            figures = asyncio.run(measure(asked.slots, asked.rows, hidden, asked.rounds, Path(folder)))
        results.append({"slots": asked.slots, "rows": asked.rows, "hidden": hidden, **figures})
        print(
            f"hidden {hidden:4}: at once {figures['at_once_s']:.3f} s, row by row {figures['row_by_row_s']:.3f} s "
            f"({figures['ratio']:.3f}, fastest {figures['ratio_of_min']:.3f}), "
            f"{1000 * figures['micro_step_s']:.1f} ms a micro-step"
        )
    write(asked.json, {**provenance("ductile", "torch"), "results": results})


if __name__ == "__main__":
    main()
