"""Which operations a device gets: on a CPU the references, which need no Triton."""

from __future__ import annotations

import pytest
import torch

from bt_builders import reference
from bt_builders._support import operations_for

pytestmark = pytest.mark.fast


def test_a_cpu_gets_the_references() -> None:
    assert operations_for(torch.device("cpu")) is reference


def test_cuda_gets_the_kernels() -> None:
    from bt_builders import kernels

    assert operations_for(torch.device("cuda", 1)) is kernels
