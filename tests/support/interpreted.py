"""Interpreted kernels: device functions that call each other fast, programs in random order.

Triton's interpreter runs programs one after another, lowest first, which hides a
program that reads what another one of the launch writes. A random order shows it.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> Iterator[None]:
    """Let a device function find the language as the launch around it has left it.

    Triton puts its interpreted operations into ``triton.language`` for every launch, and looks
    through all names of it again at every call of a device function, which took a quarter of the
    time of a kernel with many.
    """
    from triton import language
    from triton.runtime import interpreter

    patch_all: Any = interpreter._patch_lang

    def patch_what_is_not(function: Any) -> Any:
        modules = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        found = [each for each in modules if each in (language, language.core)]
        if found and not any(language.core.is_builtin(each.load) for each in found):
            return interpreter._LangPatchScope()
        return patch_all(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_what_is_not)
        yield
