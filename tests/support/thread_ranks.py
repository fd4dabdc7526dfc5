"""Several ranks as threads of one process: what they exchange passes through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

PATIENCE_S = 60


class ThreadRank:
    """One of several ranks that wait for each other whenever they gather."""

    def __init__(self, rank: int, board: list[Any], barrier: Barrier) -> None:
        self.size = len(board)
        self.rank = rank
        self._board = board
        self._barrier = barrier

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchange(values))

    def gather_texts(self, text: str) -> list[str]:
        return self._exchange(text)

    def _exchange(self, value: T) -> list[T]:
        self._board[self.rank] = value
        self._barrier.wait(PATIENCE_S)
        found = list(self._board)
        # no rank lays down anything new before all have looked
        self._barrier.wait(PATIENCE_S)
        return found


def run_ranks(size: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """Do the same work on every rank; the first error of any of them is raised."""
    barrier = Barrier(size)
    board: list[Any] = [None] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadRank(rank, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
