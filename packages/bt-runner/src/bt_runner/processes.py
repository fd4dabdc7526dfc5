"""Ranks as processes that torchrun started: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor

from bt_runner.errors import BadInputError, RankLostError
from bt_runner.models.sharding import Ranks, SingleRank
from bt_width.errors import shown

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
    """Join the processes that torchrun started, and leave them at the end; else be alone.

    Raises:
        BadInputError: The environment describes no group of processes.
        RankLostError: A rank did not come in time.
    """
    if _world_size() == 1:
        yield SingleRank()
        return
    try:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RankLostError(f"the ranks did not come together: {reason:.300}") from error
    try:
        yield ProcessRanks()
    finally:
        dist.destroy_process_group()


def _world_size() -> int:
    """Return how many processes torchrun started, 1 where it started none.

    Raises:
        BadInputError: A variable that torchrun sets is missing or no number.
    """
    if "WORLD_SIZE" not in os.environ:
        return 1
    size = _number_in("WORLD_SIZE", minimum=1)
    if size > 1:
        _number_in("RANK", minimum=0, maximum=size - 1)
        _number_in("MASTER_PORT", minimum=1, maximum=65_535)
        if not os.environ.get("MASTER_ADDR"):
            raise BadInputError("WORLD_SIZE is set and MASTER_ADDR is not: start with torchrun")
    return size


def _number_in(name: str, *, minimum: int, maximum: int = 2**31 - 1) -> int:
    text = os.environ.get(name)
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 10:
        told = "is not set" if text is None else f"is {shown(text)}, which is not a number"
        raise BadInputError(
            f"the environment's {name} {told}: start several ranks with torchrun, or unset "
            "WORLD_SIZE",
            variable=name,
        )
    if not minimum <= int(text) <= maximum:
        raise BadInputError(
            f"the environment's {name} is {text} and must lie in {minimum}..{maximum}",
            variable=name,
        )
    return int(text)


def is_told_elsewhere(message: str) -> bool:
    """Ask the store that torchrun's agent keeps whether another rank refuses the same input.

    What is free on a device differs between ranks: numbers make no other message.
    """
    told = sha256(re.sub(r"[\d,]+", "", message).encode(errors="replace")).hexdigest()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it
            os.environ["MASTER_ADDR"],
            _number_in("MASTER_PORT", minimum=1),
            is_master=False,
            timeout=timedelta(seconds=5),
        )
        return store.add(f"refused/{told}", 1) > 1
    except (RuntimeError, ValueError, KeyError):
        # without a store each rank prints: rather twice than never
        return False
