"""Interpreted kernels whose programs run in random order.

Triton's interpreter runs programs one after another, lowest first, which hides a
program that reads what another one of the launch writes. A random order shows it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Run the programs of every interpreted launch inside in an order drawn from ``seed``."""
    from triton.runtime.interpreter import interpreter_builder

    draw = random.Random(seed)
    builder = type(interpreter_builder)
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
    order: Iterator[tuple[int, ...]] = iter(())

    def set_grid_dim(self: object, *dims: int) -> None:
        nonlocal order
        programs = list(itertools.product(*(range(dim) for dim in dims)))
        draw.shuffle(programs)
        order = iter(programs)
        set_dim(self, *dims)

    def set_grid_idx(self: object, *_in_order: int) -> None:
        set_idx(self, *next(order))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_dim", set_grid_dim)
        patch.setattr(builder, "set_grid_idx", set_grid_idx)
        yield
