"""The parts of `benchmarks/gpu.py`. Each module's `run(setting)` returns figures, one of them a `sentence`."""
