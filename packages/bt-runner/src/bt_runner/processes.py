"""Ranks as processes that torchrun started: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bt_runner.errors import RankLostError
from bt_runner.models.sharding import Alone, Ranks

PATIENCE = timedelta(seconds=20)
"""How long a rank waits for the others before it gives up."""


class ProcessRanks:
    """The processes of one group.

    Attributes:
        size: How many there are.
        rank: This one's place among them.
    """

    def __init__(self) -> None:
        """Look at the group that is there."""
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    def gather(self, values: Tensor) -> Tensor:
        """Return every rank's values, ``[size, ...]``.

        Raises:
            RankLostError: A rank is gone, or did not come in time.
        """
        values = values.contiguous()
        found = [torch.empty_like(values) for _ in range(self.size)]
        try:
            dist.all_gather(found, values)
        except RuntimeError as error:
            raise self._lost(error) from error
        return torch.stack(found)

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text.

        Raises:
            RankLostError: A rank is gone, or did not come in time.
        """
        found: list[str] = [""] * self.size
        try:
            dist.all_gather_object(found, text)
        except RuntimeError as error:
            raise self._lost(error) from error
        return found

    def _lost(self, error: RuntimeError) -> RankLostError:
        reason = str(error).splitlines()[0]
        return RankLostError(
            f"rank {self.rank} of {self.size} lost another one: {reason}", rank=self.rank
        )


@contextmanager
def joined_ranks(device_type: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, and leave them at the end; else be alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Alone()
        return
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield ProcessRanks()
    finally:
        dist.destroy_process_group()
