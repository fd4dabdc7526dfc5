"""Compilations of a sample kernel, counted in a process of compiled kernels."""

from __future__ import annotations

import json

import torch
from tests.support.sample_kernels import add_one_kernel
from tests.support.stub_gpu import Recorder, install


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
