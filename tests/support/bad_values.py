"""Values that no call takes, drawn by hypothesis, and calls to hand them to."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from bt_width import BlockTableError

DTYPES = ("int32", "int64", "float32", "bool", "uint8", "int16", "float64")
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (4,), (2, 3), (3, 2), (0, 3), (1, 1, 1)]
NUMBERS = [0, 1, 2, 3, -1, 5, 100, 2**31 - 1, -(2**31)]


@st.composite
def _arrays(draw: st.DrawFn) -> Any:
    """Return an array or tensor: of odd shape, type, stride or device, or holding NaN."""
    shape: tuple[int, ...] = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(DTYPES))
    count = int(np.prod(shape))
    numbers = draw(st.lists(st.sampled_from(NUMBERS), min_size=count, max_size=count))
    array = np.array(numbers, np.int64).reshape(shape).astype(dtype)
    if dtype.startswith("float") and count:
        array.reshape(-1)[0] = draw(st.sampled_from([np.nan, np.inf, 1.5]))
    is_strided = draw(st.booleans())
    if shape and is_strided:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    match draw(st.sampled_from(["numpy", "tensor", "meta", "reversed"])):
        case "tensor":
            return torch.from_numpy(array.copy())
        case "meta":
            return torch.from_numpy(array.copy()).to("meta")
        case "reversed":
            return array[::-1] if shape else array
    return array


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**31) - 1]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=4),
    st.binary(max_size=3),
    st.sampled_from([np.int64(3), np.int32(-1), np.uint8(7), np.float64(2.0), np.bool_(True)]),
    st.sampled_from([decimal.Decimal(2), 3 + 0j, object, ..., NotImplemented]),
    st.builds(object),
)
bad_values = st.one_of(
    _scalars,
    st.lists(_scalars, max_size=4),
    st.lists(_scalars, max_size=3).map(tuple),
    st.lists(st.lists(_scalars, max_size=2), max_size=4),
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 3)), _scalars, max_size=3),
    _arrays(),
    st.sets(st.integers(0, 3), max_size=3),
    st.integers(0, 4).map(range),
    st.lists(_arrays(), max_size=3),
)
"""Anything: wrong types, negative and huge numbers, NaN, odd arrays, empty everything."""


@dataclass(frozen=True)
class Call:
    """A public call, and arguments that it takes gladly.

    Attributes:
        name: What it is called in the public interface.
        function: The call; it takes everything by keyword.
        good: Makes each argument anew, by name.
        unharmed: Fails where a refusal has changed something.
        errors: The project's own errors that it may end in.
    """

    name: str
    function: Callable[..., object]
    good: Mapping[str, Callable[[], object]]
    unharmed: Callable[[], None] = field(default=lambda: None)
    errors: tuple[type[Exception], ...] = (BlockTableError,)


@st.composite
def spoiled_arguments(draw: st.DrawFn, call: Call) -> dict[str, object]:
    """Return a call's arguments, at least one of them bad."""
    names = sorted(call.good)
    spoiled = draw(st.sets(st.sampled_from(names), min_size=1, max_size=2))
    return {name: draw(bad_values) if name in spoiled else call.good[name]() for name in names}


def refuses_or_answers(call: Call, arguments: Mapping[str, object]) -> None:
    """Make a call; it may end in the project's own error alone, and then has changed nothing."""
    refusal = None
    try:
        call.function(**arguments)
    except call.errors as error:
        refusal = error
    except Exception as error:
        raise AssertionError(
            f"{call.name}({dict(arguments)!r}) ended in {type(error).__name__}: {error}"
        ) from error
    if refusal is not None:
        assert len(str(refusal)) > 10, f"{call.name} refused without a word: {refusal!r}"
        call.unharmed()
