"""The tokens of a step: where each request starts, their positions, how many are real."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from bt_width import InvalidEditError, WidthMismatchError

from .arrays import INT32, INT64, HostArray, IntArray, check_device_vector, host_array


class Tokens(NamedTuple):
    """What a launch maps to slots; arrays are on the host, tensors on the device.

    Attributes:
        starts: First token of each request and the end of the last, [N + 1] int32.
        positions: Place of each token in its request, int64.
        bound: No token at or above it is real; the number of real ones where the
            starts are on the host.
    """

    starts: IntArray | torch.Tensor
    positions: IntArray | torch.Tensor
    bound: int


NO_TOKENS = Tokens(np.zeros(1, np.int32), np.empty(0, np.int64), 0)


def vector_length(starts: HostArray) -> int:
    """Return how many elements ``query_start_loc`` has.

    Raises:
        WidthMismatchError: It is no vector.
    """
    shape = tuple[int, ...](getattr(starts, "shape", ()))
    if len(shape) != 1:
        raise WidthMismatchError(
            f"query_start_loc must be a vector, not {type(starts).__name__} of shape {list(shape)}",
            argument="query_start_loc",
        )
    return int(shape[0])


def read_tokens(
    starts: HostArray,
    positions: HostArray,
    num_requests: int,
    num_padded: int,
    device: torch.device,
) -> Tokens:
    """Check the tokens of a step, at a cost that does not depend on how many there are.

    Raises:
        WidthMismatchError: A dtype, shape, stride or device is wrong.
        InvalidEditError: There are fewer positions than tokens.
    """
    starts = _read("query_start_loc", starts, INT32, device)
    positions = _read("positions", positions, INT64, device)
    if len(starts) != num_requests + 1:
        raise WidthMismatchError(
            f"query_start_loc must have {num_requests + 1} elements for {num_requests} "
            f"requests, not {len(starts)}",
            num_requests=num_requests,
            length=len(starts),
        )
    if isinstance(starts, torch.Tensor):
        return Tokens(starts, positions, min(num_padded, len(positions)))
    bound = max(min(int(starts[-1]), num_padded), 0)
    if bound > len(positions):
        raise InvalidEditError(
            f"{len(positions)} positions for {bound} tokens; give each token its position",
            num_positions=len(positions),
            num_tokens=bound,
        )
    return Tokens(starts, positions, bound)


def _read(
    name: str, value: HostArray, dtype: np.dtype[Any], device: torch.device
) -> IntArray | torch.Tensor:
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        check_device_vector(name, value, dtype, device)
        return value
    return host_array(name, value, dtype, 1)
