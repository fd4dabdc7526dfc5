"""Ctrl-C at an instruction of the test's choice, and all instructions there are to choose from."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeAlias

Place: TypeAlias = tuple[CodeType, int]
"""An instruction: a function's code, and how far into it."""


class Interruption(KeyboardInterrupt):  # Ctrl-C is no error
    """Ctrl-C at a place of the test's choice."""


@contextmanager
def watched(modules: list[ModuleType], on_place: Callable[[Place], None]) -> Iterator[None]:
    """Call ``on_place`` before each instruction of some modules; what it raises comes out there."""
    files = {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            on_place((frame.f_code, frame.f_lasti))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def passes_of(modules: list[ModuleType], work: Callable[[], object]) -> Counter[Place]:
    """Return every instruction of some modules that ``work`` comes to, and how often."""
    places: Counter[Place] = Counter()
    with watched(modules, lambda place: places.update((place,))):
        work()
    return places


def places_of(modules: list[ModuleType], work: Callable[[], object]) -> list[Place]:
    """Return every instruction of some modules that ``work`` comes to."""
    return list(passes_of(modules, work))


def interrupt_at(
    place: Place, modules: list[ModuleType], work: Callable[[], object], *, nth: int = 1
) -> bool:
    """Do ``work`` up to the n-th time it comes to a place; say whether it ended there."""
    left = nth

    def raise_at(here: Place) -> None:
        nonlocal left
        if here == place:
            left -= 1
            if left <= 0:
                raise Interruption

    try:
        with watched(modules, raise_at):
            work()
    except Interruption:
        return True
    return False
