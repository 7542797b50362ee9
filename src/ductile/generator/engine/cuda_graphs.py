"""CUDA graphs as `DecodeRunner` records its steps: `torch.cuda.graph`, one pool of memory for all of them.

A graph is the kernels of a step with their arguments, launched by one call: it reads and writes the addresses that the
step had when it was captured. What a step allocates comes from the pool, which graphs share: they run one after the
other, and nothing in the pool is read after the step.
"""

from collections.abc import Callable

import torch


class CudaGraphs:
    """`ductile.generator.engine.decode_runner.StepRecorder` on a GPU."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `work` once and capture it. Raises RuntimeError, as torch does, where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            # The stream is entered here, too: torch does not leave it where a capture fails.
            with torch.cuda.stream(self._stream):
                work()  # libraries make their handles and workspaces in the first call, which may not be captured
                # Other threads receive weights meanwhile: what they call must not fail the capture.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    work()
        finally:
            current.wait_stream(self._stream)
        return graph
