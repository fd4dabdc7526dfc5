"""Block tables on the device: staged edits, one copy and one launch a step."""

from .cache import kernel_block_view, kv_cache_shape, state_slots, write_states
from .csr import CsrTable
from .multi_group import MultiGroupBlockTable
from .sanitizer import BlockTableSanitizer
from .staged import StagedBlockTables, StepBatch, StepTables

__version__ = "0.1.0"

__all__ = [
    "BlockTableSanitizer",
    "CsrTable",
    "MultiGroupBlockTable",
    "StagedBlockTables",
    "StepBatch",
    "StepTables",
    "kernel_block_view",
    "kv_cache_shape",
    "state_slots",
    "write_states",
]
