"""A slot that changes its roles while others keep theirs, all on one device.

Slots 0 and 1 train a model of about 0.1 B parameters, slot 2 generates. Slot 1 goes from training to generating and
back, and generates beside its training for a while. After each change all slots do their work.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gpu_parts.part import Setting
from gpu_parts.slots import generator_on, slots_on


def run(setting: Setting) -> dict[str, Any]:
    return asyncio.run(story(setting))


async def story(setting: Setting) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    pauses_s: list[float] = []
    async with slots_on(setting, "0.1B", 3) as slots:
        trainer = await slots.train((0, 1))
        generators = await slots.generate((2,), trainer)
        await slots.step(trainer)
        await generators.receive(await trainer.publish(1))
        await trainer.withdraw(1)
        await slots.completions(generators, 1)

        async def to_generate() -> None:
            pauses_s.append((await slots.resize(trainer, (0,))).pause_s)
            await slots.admit(generators, 1)

        async def to_train() -> None:
            await generators.dismiss(generator_on(1))
            pauses_s.append((await slots.resize(trainer, (0, 1))).pause_s)

        changes: dict[str, Callable[[], Awaitable[None]]] = {
            "train → generate": to_generate,
            "generate → train": to_train,
            "train → train+generate": lambda: slots.admit(generators, 1),
            "train+generate → train": lambda: generators.dismiss(generator_on(1)),
        }
        for name, change in changes.items():
            start, pauses_s = time.perf_counter(), [0.0]
            await change()
            rows.append({"change": name, "seconds": time.perf_counter() - start, "trainer_pause_s": pauses_s[-1]})
            await slots.completions(generators, 1)
            await slots.step(trainer)
    told = "; ".join(f"{row['change']} {row['seconds']:.2f} s" for row in rows)
    return {"changes": rows, "sentence": told}
