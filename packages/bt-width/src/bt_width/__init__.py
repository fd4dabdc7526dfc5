"""The pure contract of paged KV-cache block tables.

How many blocks a request needs, how wide a row is, where a token lies: computed
once, and handed down as one object. Standard library only.
"""

from .addressing import Addressing, Location
from .capacity import (
    addressable_tokens,
    index_buffer_bytes,
    longest_request,
    max_addressable_blocks,
    row_bytes,
    table_bytes,
    tables_bytes,
)
from .errors import (
    BlockTableError,
    InvalidEditError,
    InvalidSpecError,
    NoCommonBlockSizeError,
    RowOverflowError,
    UnknownModelError,
    WidthMismatchError,
)
from .kernel_blocks import MultipleOf, select_kernel_block_size
from .layout import MAX_POSITION, BlockTableLayout
from .limits import ContextParallel, ServingLimits
from .models.groups import GroupMember, ModelGroup
from .models.model import ModelCaches
from .models.reader import read_model
from .specs import (
    AttentionSpec,
    CacheSpec,
    LayerSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
)
from .width import NULL_BLOCK, PAD_SLOT, BlockTableWidth, get_block_table_width

__version__ = "0.1.0"

__all__ = [
    "MAX_POSITION",
    "NULL_BLOCK",
    "PAD_SLOT",
    "Addressing",
    "AttentionSpec",
    "BlockTableError",
    "BlockTableLayout",
    "BlockTableWidth",
    "CacheSpec",
    "ContextParallel",
    "GroupMember",
    "InvalidEditError",
    "InvalidSpecError",
    "LayerSpec",
    "Location",
    "MambaSpec",
    "ModelCaches",
    "ModelGroup",
    "MultipleOf",
    "NoCommonBlockSizeError",
    "RingSpec",
    "RowOverflowError",
    "ServingLimits",
    "SlidingWindowSpec",
    "UniformSpec",
    "UnknownModelError",
    "WidthMismatchError",
    "__version__",
    "addressable_tokens",
    "get_block_table_width",
    "index_buffer_bytes",
    "longest_request",
    "max_addressable_blocks",
    "read_model",
    "row_bytes",
    "select_kernel_block_size",
    "table_bytes",
    "tables_bytes",
]
