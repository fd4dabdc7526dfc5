"""Small kernels that show that the tools around kernels can fail.

Run as a program where kernels are compiled, it counts the compilations of one of them.
"""

from __future__ import annotations

import json

import torch
from tests.support.stub_gpu import Recorder, install

from bt_tables.triton_support import jit, tl


@jit
def add_one_kernel(
    values_ptr: tl.tensor,  # [size] int32
    size: tl.tensor,
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Add 1 to every value: no program touches what another one does."""
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = index < size
    tl.store(values_ptr + index, tl.load(values_ptr + index, mask=mask, other=0) + 1, mask=mask)


@jit
def racy_sum_kernel(
    values_ptr: tl.tensor,  # [programs + 1] int32
) -> None:
    """Add the left neighbour, which another program writes: right in ascending order only."""
    index = tl.program_id(0)
    tl.store(values_ptr + index + 1, tl.load(values_ptr + index) + tl.load(values_ptr + index + 1))


def main() -> None:
    """Print the compilations after free values changed, then after a constexpr did."""
    install()
    recorder = Recorder(add_one_kernel)
    values = torch.zeros(64, dtype=torch.int32)
    for start, size in ((0, 1), (1, 16), (3, 33)):
        recorder[(4,)](values[start:], size, TILE=16)
    free = recorder.compilations
    recorder[(4,)](values, 16, TILE=32)
    print(json.dumps({"free": free, "two tiles": recorder.compilations}))


if __name__ == "__main__":
    main()
