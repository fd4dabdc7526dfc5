"""The runner's tests use tensors so small that a second thread only waits, and lose no block."""

import torch
from tests.support.pool_leaks import loses_blocks, no_pool_leaks

__all__ = ["loses_blocks", "no_pool_leaks"]

torch.set_num_threads(1)
