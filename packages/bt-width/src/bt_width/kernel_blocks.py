"""Which kernel block size all backends of a group can read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ._checks import require_instance, require_int
from .errors import InvalidSpecError, NoCommonBlockSizeError, shown


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Every multiple of ``n`` tokens.

    Attributes:
        n: The unit, in tokens.
    """

    n: int

    def __post_init__(self) -> None:
        """Check the unit."""
        require_int("MultipleOf", self.n, minimum=1)


SupportedSizes: TypeAlias = Sequence[int | MultipleOf]
"""The kernel block sizes that one backend reads."""


def select_kernel_block_size(
    block_size: int, supported: Sequence[SupportedSizes] | Mapping[str, SupportedSizes]
) -> int:
    """Return the kernel block size that every backend of a group reads.

    The block itself if all take it whole; else the largest size that some backend
    lists, all take, and that divides the block. A multiple need never be tried: where
    it divides the block, its backend takes the block itself.

    Args:
        block_size: Tokens of a block.
        supported: One list per backend, by name or in sequence.

    Raises:
        InvalidSpecError: An argument is of a wrong type, or a list is empty.
        NoCommonBlockSizeError: No size suits all; the message gives each
            backend's list and the nearest block size for which there is one.
    """
    require_int("block_size", block_size, minimum=1)
    backends = _by_name(supported)
    candidates = {block_size, *_common_listed_sizes(backends)}
    for size in sorted(candidates, reverse=True):
        if block_size % size == 0 and _all_take(backends, size):
            return size
    nearest = _nearest_block_size(block_size, backends)
    lists = "; ".join(f"{name} takes {_describe(sizes)}" for name, sizes in backends.items())
    advice = (
        "no block size suits them all; choose other backends"
        if nearest is None
        else f"the nearest block size that works is {nearest}"
    )
    raise NoCommonBlockSizeError(
        f"no kernel block size divides block_size {block_size} and suits every backend: "
        f"{lists}; {advice}",
        block_size=block_size,
        supported=backends,
        nearest=nearest,
    )


def _by_name(
    supported: Sequence[SupportedSizes] | Mapping[str, SupportedSizes],
) -> dict[str, tuple[int | MultipleOf, ...]]:
    try:
        if isinstance(supported, Mapping):
            backends = {name: tuple(sizes) for name, sizes in supported.items()}
        else:
            backends = {f"backend {i}": tuple(sizes) for i, sizes in enumerate(supported)}
    except TypeError:
        raise InvalidSpecError(
            f"supported must hold one list of sizes per backend, not {shown(supported)}",
            value=supported,
        ) from None
    for name, sizes in backends.items():
        require_instance("a backend's name", name, str, wanted="a str")
        if not sizes:
            raise InvalidSpecError(f"{name} lists no kernel block size", backend=name)
        for size in sizes:
            if not isinstance(size, MultipleOf):
                require_int(f"a kernel block size of {name}", size, minimum=1)
    return backends


def _takes(sizes: SupportedSizes, size: int) -> bool:
    return any(
        size % listed.n == 0 if isinstance(listed, MultipleOf) else size == listed
        for listed in sizes
    )


def _all_take(backends: Mapping[str, SupportedSizes], size: int) -> bool:
    return all(_takes(sizes, size) for sizes in backends.values())


def _common_listed_sizes(backends: Mapping[str, SupportedSizes]) -> set[int]:
    listed = {size for sizes in backends.values() for size in sizes if isinstance(size, int)}
    return {size for size in listed if _all_take(backends, size)}


def _nearest_block_size(block_size: int, backends: Mapping[str, SupportedSizes]) -> int | None:
    """Return the closest block size with a common kernel block; the smaller of two."""
    units = _common_listed_sizes(backends) | _common_multiples(backends)
    below = {block_size // unit * unit for unit in units}
    above = {-(-block_size // unit) * unit for unit in units}
    legal = {size for size in below | above if size > 0}
    return min(legal, key=lambda size: (abs(size - block_size), size), default=None)


def _common_multiples(backends: Mapping[str, SupportedSizes]) -> set[int]:
    """Return the units whose every multiple all backends take whole."""
    units = {1}
    for sizes in backends.values():
        multiples = [size.n for size in sizes if isinstance(size, MultipleOf)]
        units = {math.lcm(unit, n) for unit in units for n in multiples}
    return units


def _describe(sizes: SupportedSizes) -> str:
    words = [
        f"multiples of {size.n}" if isinstance(size, MultipleOf) else str(size) for size in sizes
    ]
    return ", ".join(words)
