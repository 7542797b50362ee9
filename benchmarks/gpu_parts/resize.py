"""How long a live trainer stands still when it changes its slots, all on one device.

About 0.1 B parameters, AdamW, fp32 masters. It goes through the layouts below, once between two batches and once in
the middle of one, when the gradient moves as well; a step follows each change.
"""

import asyncio
import statistics
from typing import Any

from gpu_parts.part import Setting
from gpu_parts.slots import slots_on

LAYOUTS = [(0, 1), (0, 1, 2), (0,), (1, 2)]


def run(setting: Setting) -> dict[str, Any]:
    return asyncio.run(story(setting))


async def story(setting: Setting) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    async with slots_on(setting, "0.1B", 3) as slots:
        trainer = await slots.train(LAYOUTS[0])
        await slots.step(trainer)
        # Back where it began for the second time round, in the middle of a batch.
        changes = [(after, False) for after in LAYOUTS[1:]]
        changes += [(after, True) for after in LAYOUTS]
        for after, inside in changes:
            before = trainer.layout.slots
            if inside:
                await slots.half_a_batch(trainer)
            result = await slots.resize(trainer, after)
            await slots.step(trainer)
            rows.append(
                {
                    "before": list(before),
                    "after": list(after),
                    "in_a_batch": inside,
                    "moved_bytes": result.num_bytes,
                    "carrier": result.carrier,
                    "pause_s": result.pause_s,
                    "seconds": dict(result.seconds),
                    "slot_seconds": dict(result.slot_seconds),
                }
            )
    pause_s = statistics.median(row["pause_s"] for row in rows)
    carrier = rows[0]["carrier"].partition(":")[0]
    return {
        "median_pause_s": pause_s,
        "max_pause_s": max(row["pause_s"] for row in rows),
        "resizes": rows,
        "sentence": f"{len(rows)} resizes, median pause {pause_s:.3f} s, by {carrier}",
    }
