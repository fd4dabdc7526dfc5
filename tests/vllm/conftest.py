"""Lets vLLM's runners run where the host is the device; nothing is done where vLLM is missing."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("vllm") is not None:
    # vLLM looks for a driver of Triton unless it is told that devices come later
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

    from vllm.utils import torch_utils

    # every other module of vLLM copies it when it is imported
    torch_utils.PIN_MEMORY = False
