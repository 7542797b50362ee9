"""From the trainer's weights to generators that sample from them, all on one device.

Slot 0 trains a model of Qwen3-0.6B's shape, slots 1 and 2 generate. Each version is published, received by both, and
withdrawn, with a training step between two; at the end both generate, from the last version alone.
"""

import asyncio
import statistics
import time
from typing import Any

from gpu_parts.part import Setting
from gpu_parts.slots import slots_on

VERSIONS = 4
"""The first one is not counted."""


def run(setting: Setting) -> dict[str, Any]:
    return asyncio.run(story(setting))


async def story(setting: Setting) -> dict[str, Any]:
    publish_s, receive_s, num_bytes, carrier = list[float](), list[float](), 0, ""
    async with slots_on(setting, "0.6B", 3) as slots:
        trainer = await slots.train((0,))
        generators = await slots.generate((1, 2), trainer)
        for version in range(1, VERSIONS + 1):
            await slots.step(trainer)
            start = time.perf_counter()
            manifest = await trainer.publish(version)
            between = time.perf_counter()
            await generators.receive(manifest)
            publish_s.append(between - start)
            receive_s.append(time.perf_counter() - between)
            num_bytes, carrier = manifest.num_bytes, manifest.carrier
            await trainer.withdraw(version)
        await slots.completions(generators, VERSIONS)
    both_s = statistics.median(map(sum, zip(publish_s[1:], receive_s[1:], strict=True)))
    return {
        "publish_s": statistics.median(publish_s[1:]),
        "receive_s": statistics.median(receive_s[1:]),
        "seconds": both_s,
        "num_bytes": num_bytes,
        "gb_per_s": num_bytes / both_s / 1e9,
        "carrier": carrier,
        "sentence": f"{num_bytes / 1e9:.2f} GB to two generators in {both_s:.2f} s, by {carrier}",
    }
