"""The one door to Triton: a typed ``jit`` and the language; it knows no kernel.

Importing this module imports Triton, so kernel modules alone import it, and they
are imported only where a table is made on CUDA or a test asks for its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import triton
from triton import language as tl

__all__ = ["Kernel", "jit", "tl"]


class Kernel(Protocol):
    """A compiled or interpreted Triton function."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return the launcher over ``grid`` programs."""
        ...

    def __call__(self, *args: object, **kwargs: object) -> tl.tensor:
        """Call it from another kernel."""
        ...


def jit(*, any_value: Sequence[str] = ()) -> Callable[[Callable[..., object]], Kernel]:
    """Return a decorator that makes a Triton kernel of a function.

    Args:
        any_value: Parameters whose value and alignment must not choose a compilation:
            sizes that differ from step to step and views that start anywhere.
    """
    names = list(any_value)
    decorate = triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)
    return cast(Callable[[Callable[..., object]], Kernel], decorate)
