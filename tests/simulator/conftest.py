"""No soak may lose a block unnoticed, and small tensors need one thread."""

import torch
from tests.support.pool_leaks import loses_blocks, no_pool_leaks

__all__ = ["loses_blocks", "no_pool_leaks"]

torch.set_num_threads(1)
