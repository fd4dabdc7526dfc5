"""What fits into a GPU's memory: pools that run out together, requests, the longest request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..errors import InvalidSpecError
from ..layout import BlockTableLayout
from ..models.groups import ModelGroup
from .planned import PlannedGroup
from .sizes import show_bytes


class Pool(NamedTuple):
    """The blocks of one group.

    Attributes:
        name: The group's name.
        num_blocks: Blocks of the pool, the null block included.
        block_bytes: Bytes of a block on the GPU that holds most.
        blocks_per_request: Blocks of a request of the length that was asked for.
        headroom: Blocks that serve no single request: the null block, and what the
            prompt tokens of a step need besides a window.
    """

    name: str
    num_blocks: int
    block_bytes: int
    blocks_per_request: int
    headroom: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What fits into the memory of one GPU.

    Attributes:
        memory: Bytes for caches on each GPU.
        pools: The pool of each group.
        at_len: Tokens of the requests that are counted.
        num_requests: Requests of that length that fit at once.
        longest: Tokens of the longest request that fits alone, at most ``max_model_len``.
        limited_by: What limits the number of requests, in words.
    """

    memory: int
    pools: tuple[Pool, ...]
    at_len: int
    num_requests: int
    longest: int
    limited_by: str


def stage_bytes(group: ModelGroup, pp: int) -> list[int]:
    """Return the bytes of a block on each pipeline stage.

    The stages take the layers in order, the first of them one more where it does not
    come out even; draft layers are the last stage's.

    Raises:
        InvalidSpecError: There are more stages than layers.
    """
    layers = len(group.layer_bytes)
    if not 1 <= pp <= layers:
        raise InvalidSpecError(f"--pp must be in 1..{layers}, the model's layers, not {pp}", pp=pp)
    each, rest = divmod(layers, pp)
    starts = [stage * each + min(stage, rest) for stage in range(pp + 1)]
    stages = [sum(group.layer_bytes[a:b]) for a, b in pairwise(starts)]
    stages[-1] += group.draft_bytes
    return stages


class _Need(NamedTuple):
    """What one group's pool must hold.

    Attributes:
        layout: The group's plan.
        stages: Bytes of a block on each stage.
        headroom: Blocks that serve no single request.
        decoding: The most blocks of a request that decodes.
    """

    layout: BlockTableLayout
    stages: list[int]
    headroom: int
    decoding: int

    def blocks(self, num_tokens: int) -> int:
        """Return the blocks of a request of ``num_tokens`` tokens that decodes."""
        limits = self.layout.limits
        held = self.layout.num_blocks(min(num_tokens + limits.lookahead_tokens, limits.max_tokens))
        return min(held, self.decoding)


def fit(planned: Sequence[PlannedGroup], memory: int, *, at_len: int | None, pp: int) -> Capacity:
    """Return what fits into ``memory`` bytes on each GPU.

    All memory goes to the pools, in the ratio in which requests of ``at_len`` tokens use
    their groups, so that no pool runs out before another.

    Raises:
        InvalidSpecError: The memory holds not even one token, or ``at_len`` is longer
            than a request may be.
    """
    needs = [_need(group, pp) for group in planned]
    limits = planned[0].layout.limits
    length = limits.max_model_len if at_len is None else at_len
    if length > limits.max_model_len:
        raise InvalidSpecError(
            f"--at-len {length} is longer than the longest request, {limits.max_model_len} tokens",
            at_len=length,
            max_model_len=limits.max_model_len,
        )
    longest = _longest(needs, memory, limits.max_model_len)
    stages = [_Stage.of(needs, memory, length, stage) for stage in range(pp)]
    requests = min(stage.times(1) for stage in stages)
    pools = tuple(
        Pool(
            name=group.name,
            num_blocks=need.headroom + min(stage.times(need.blocks(length)) for stage in stages),
            block_bytes=max(need.stages),
            blocks_per_request=need.blocks(length),
            headroom=need.headroom,
        )
        for group, need in zip(planned, needs, strict=True)
    )
    return Capacity(
        memory=memory,
        pools=pools,
        at_len=length,
        num_requests=min(requests, limits.max_num_reqs),
        longest=longest,
        limited_by=_limit(pools, requests, limits.max_num_reqs, length),
    )


def longest_that_fits(planned: Sequence[PlannedGroup], memory: int, pp: int) -> int:
    """Return the tokens of the longest request that fits into ``memory`` bytes alone.

    Raises:
        InvalidSpecError: Not even one of one token does.
    """
    needs = [_need(group, pp) for group in planned]
    return _longest(needs, memory, planned[0].layout.limits.max_model_len)


def _need(planned: PlannedGroup, pp: int) -> _Need:
    layout, group = planned.layout, planned.group
    if group is None:
        raise InvalidSpecError("memory is planned for a model's groups", group=planned.name)
    limits = layout.limits
    decoding = layout.max_resident_blocks(1 + limits.num_speculative_tokens)
    prefilling = layout.max_resident_blocks(limits.max_num_batched_tokens)
    return _Need(layout, stage_bytes(group, pp), 1 + prefilling - decoding, decoding)


def _stage_total(needs: Sequence[_Need], blocks: Callable[[_Need], int], stage: int) -> int:
    return sum(blocks(need) * need.stages[stage] for need in needs)


class _Stage(NamedTuple):
    """What one pipeline stage has for requests, and what each of them takes.

    Attributes:
        free: Bytes besides the headroom of the pools.
        each: Bytes of a request; 0 where the stage keeps no cache.
    """

    free: int
    each: int

    @classmethod
    def of(cls, needs: Sequence[_Need], memory: int, length: int, stage: int) -> _Stage:
        """Return a stage's bytes for requests of ``length`` tokens."""
        headroom = _stage_total(needs, lambda need: need.headroom, stage)
        each = _stage_total(needs, lambda need: need.blocks(length), stage)
        return cls(max(memory - headroom, 0), each)

    def times(self, count: int) -> int:
        """Return how often ``count`` of something that each request takes fits."""
        # a stage without a cache limits nothing
        return self.free * count // self.each if self.each else self.free * count


def _longest(needs: Sequence[_Need], memory: int, bound: int) -> int:
    stages = range(len(needs[0].stages))

    def fits(length: int) -> bool:
        return all(
            _stage_total(needs, lambda need: need.headroom + need.blocks(length), stage) <= memory
            for stage in stages
        )

    if not fits(1):
        least = max(
            _stage_total(needs, lambda need: need.headroom + need.blocks(1), stage)
            for stage in stages
        )
        raise InvalidSpecError(
            f"--memory {show_bytes(memory)} holds no request: one token takes "
            f"{show_bytes(least)}, null blocks and a step's prompt tokens included",
            memory=memory,
            needed=least,
        )
    low, high = 1, bound
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _limit(pools: Sequence[Pool], requests: int, max_num_reqs: int, length: int) -> str:
    if requests >= max_num_reqs:
        return f"--max-num-seqs {max_num_reqs:,}: the memory holds {requests:,} such requests"
    each = [pool.blocks_per_request * pool.block_bytes for pool in pools]
    largest = max(range(len(pools)), key=each.__getitem__)
    share = 100 * each[largest] / sum(each)
    return (
        f"--memory: a request of {length:,} tokens takes {show_bytes(sum(each))}, "
        f"{share:.0f} % of it in group {pools[largest].name}"
    )
