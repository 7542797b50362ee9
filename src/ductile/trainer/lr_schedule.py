"""The learning rate of each optimizer step: a function of the step, so that a resumed run needs nothing but it.

lr  |   __________
    |  /          \\        linear: the last `decay_steps` of `max_steps` go down to `min_lr`, or all after the warm-up
    | /            \\       cosine: half a cosine from the end of the warm-up to `max_steps`
    |/              \\__    constant: no end
    +--------------------- step
"""

from math import cos, pi

from ductile.config.schema.trainer import ConstantSchedule, CosineSchedule, LinearSchedule, SchedulerConfig, in_steps


def learning_rate(config: SchedulerConfig, peak: float, step: int, max_steps: int | None) -> float:
    """Learning rate of the optimizer step with index `step` (from 0). `peak` is the optimizer's `lr`.

    Raises ValueError when a schedule that ends is not told when (`max_steps` None).
    """
    if max_steps is None and not isinstance(config, ConstantSchedule):
        raise ValueError(f"scheduler.type = {config.type!r} needs max_steps: it ends there")
    if max_steps is None and isinstance(config.warmup_steps, float):
        raise ValueError(f"scheduler.warmup_steps = {config.warmup_steps} needs max_steps: it is a share of them")
    warmup = in_steps(config.warmup_steps, max_steps or 0)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if max_steps is None or isinstance(config, ConstantSchedule):
        return peak
    done = _share_of_decay(config, step, max_steps)
    if isinstance(config, LinearSchedule):
        return peak + (config.min_lr - peak) * done
    return config.min_lr + (peak - config.min_lr) * (1 + cos(pi * done)) / 2


def _share_of_decay(config: LinearSchedule | CosineSchedule, step: int, max_steps: int) -> float:
    """Share of the decay that is done: 0 where it begins, 1 at `max_steps`, one after the last step of a run."""
    start = in_steps(config.warmup_steps, max_steps)
    if isinstance(config, LinearSchedule) and config.decay_steps is not None:
        start = max(start, max_steps - in_steps(config.decay_steps, max_steps))
    if step >= max_steps:
        return 1.0
    return max(0, step - start) / max(1, max_steps - start)
