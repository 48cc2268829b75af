"""The fast path on a GPU: a forward of a fixed shape, captured once as a CUDA graph and replayed without Python.

A decoding step of a small model is bound by the launching of its kernels, not by their work. What a replay needs is
static: inputs, positions and cache live at fixed addresses, and attention looks at whole steps of the cache, so that a
shape recurs. Never run on a GPU so far; the logic is tested with a recorder that runs on the CPU.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_COLUMNS = 16  # prompts are read eagerly: their shapes do not recur, and their kernels are large
USES_BEFORE_CAPTURE = 8  # a capture costs a few forwards
VIEW_STEP = 256  # slots; coarser than the eager path's, so that a growing answer meets few shapes

Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a computation -> how to replay it, and the tensor that every replay writes its result to."""
Forward = Callable[[Tensor, Tensor], Tensor]

log = logging.getLogger(__name__)


def record(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record on the current CUDA device. Raises RuntimeError where `run` waits for the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate their workspaces outside of the graph
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output


@dataclass(frozen=True, kw_only=True)
class _Graph:
    tokens: Tensor
    positions: Tensor
    replay: Callable[[], None]
    output: Tensor


class Graphs:
    """The forwards of one running batch: shapes that recur are replayed, all others go to the eager twin `forward`."""

    def __init__(self, forward: Forward, recorder: Recorder = record) -> None:
        self.forward, self.recorder = forward, recorder
        self.refused = False
        self.forget()

    def forget(self) -> None:
        """The cache has moved in memory: what was captured is worth nothing now."""
        self.uses: Counter[tuple[int, ...]] = Counter()
        self.captured: dict[tuple[int, ...], _Graph] = {}

    def __call__(self, tokens: Tensor, positions: Tensor, view: int) -> Tensor:  # [B, N], [B, N] -> hidden [B, N, H]
        """One forward; `view` is how many slots attention looks at."""
        shape = (*tokens.shape, view)
        self.uses[shape] += 1
        if shape not in self.captured:
            if self.refused or tokens.shape[1] > MOST_COLUMNS or self.uses[shape] <= USES_BEFORE_CAPTURE:
                return self.forward(tokens, positions)
            try:
                self.captured[shape] = self._capture(tokens.clone(), positions.clone())
            except RuntimeError as error:
                log.warning("a forward cannot be captured as a CUDA graph, the eager one goes on: %s", error)
                self.refused = True
                return self.forward(tokens, positions)
        graph = self.captured[shape]
        graph.tokens.copy_(tokens)
        graph.positions.copy_(positions)
        graph.replay()
        return graph.output.clone()

    def _capture(self, tokens: Tensor, positions: Tensor) -> _Graph:
        replay, output = self.recorder(lambda: self.forward(tokens, positions))
        return _Graph(tokens=tokens, positions=positions, replay=replay, output=output)
