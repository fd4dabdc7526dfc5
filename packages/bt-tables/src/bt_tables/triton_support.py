"""The one door to Triton: a typed ``jit`` and the language; it knows no kernel.

Importing this module imports Triton, so kernel modules alone import it, and they
are imported only where a table is made on CUDA or a test asks for its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import triton
from triton import language as tl

__all__ = ["Kernel", "jit", "tl"]


class Kernel(Protocol):
    """A compiled or interpreted Triton function."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return the launcher over ``grid`` programs."""
        ...

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call it from another kernel."""
        ...


def jit(function: Callable[..., object]) -> Kernel:
    """Make a Triton kernel of a function.

    What is annotated ``tl.tensor`` may have any value: sizes that differ from step to step
    and views that start anywhere never choose a compilation. What is annotated
    ``tl.constexpr`` does, once for each value.
    """
    any_value = [
        name
        for name, annotation in function.__annotations__.items()
        if annotation == "tl.tensor" and name != "return"
    ]
    decorate = triton.jit(do_not_specialize=any_value, do_not_specialize_on_alignment=any_value)
    return cast(Kernel, decorate(function))
