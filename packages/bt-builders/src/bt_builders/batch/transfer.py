"""Small host arrays on their way to the device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Return ``array`` as a tensor on ``device``.

    On CUDA it goes through pinned memory of torch's own pool, which gives a buffer out
    again only after the stream has read it.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
