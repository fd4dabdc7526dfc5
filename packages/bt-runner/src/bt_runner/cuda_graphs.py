"""Captures decode steps once per size and replays them, so that the host launches one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from bt_builders import CudagraphSupport
from bt_runner.arguments import require_int, require_kind
from bt_runner.errors import BadInputError
from bt_runner.scheduler import SchedulerOutput
from bt_width import ServingLimits

Work: TypeAlias = Callable[[], list[Tensor]]
"""Computes a step from tensors that never move; returns the residual stream of each layer."""

_WARM_UPS = 2


class Capture(Protocol):
    """Turns work into a replay of it."""

    def __call__(self, work: Work) -> Work:
        """Do the work, and return what does it again with what its tensors hold by then."""


class CudaCapture:
    """Captures CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        """Start without a pool; the first graph makes one."""
        self._pool: Any = None

    def __call__(self, work: Work) -> Work:
        """Warm up beside the current stream, then capture.

        Raises:
            BadInputError: There is no CUDA device.
        """
        if not torch.cuda.is_available():
            raise BadInputError("CUDA graphs need a CUDA device, and there is none")
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = work()
        self._pool = graph.pool()

        def replay() -> list[Tensor]:
            graph.replay()
            return outputs

        return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Which decode steps are captured, and how.

    Attributes:
        batch_sizes: Requests of a captured step; smaller steps are padded, larger ones
            run as they are.
        capture: Turns work into a replay of it.
    """

    batch_sizes: tuple[int, ...] = ()
    capture: Capture = field(default_factory=CudaCapture)

    def __post_init__(self) -> None:
        """Refuse sizes that no batch has."""
        require_kind("batch_sizes", self.batch_sizes, tuple)
        for size in self.batch_sizes:
            require_int("a graph's batch size", size, minimum=1)


class GraphSize(NamedTuple):
    """What a captured step is made for.

    Attributes:
        num_reqs: Requests, padding included.
        query_len: Tokens of each.
    """

    num_reqs: int
    query_len: int


def graph_sizes(
    batch_sizes: Iterable[int], limits: ServingLimits, support: CudagraphSupport
) -> list[GraphSize]:
    """Return the sizes to capture, as far as the builders and the limits allow."""
    query_lens = {1, 1 + limits.num_speculative_tokens}
    if support.level == "never":
        return []
    if support.level == "single":
        query_lens = {1}
    # a request that decodes has a token before those of the step
    query_lens = {query_len for query_len in query_lens if query_len < limits.max_model_len}
    sizes = [
        GraphSize(min(num_reqs, limits.max_num_reqs), query_len)
        for num_reqs in sorted(set(batch_sizes))
        for query_len in sorted(query_lens)
    ]
    return [
        size for size in sizes if size.num_reqs * size.query_len <= limits.max_num_batched_tokens
    ]


def fitting_size(batch: SchedulerOutput, sizes: Iterable[GraphSize]) -> GraphSize | None:
    """Return the smallest size that a batch can be padded to; None for one that runs as it is."""
    num_tokens = batch.num_tokens
    query_len = int(num_tokens[0])
    if batch.is_prefilling.any() or (num_tokens != query_len).any():
        return None
    fitting = (
        size for size in sizes if size.query_len == query_len and size.num_reqs >= len(num_tokens)
    )
    return min(fitting, default=None)
