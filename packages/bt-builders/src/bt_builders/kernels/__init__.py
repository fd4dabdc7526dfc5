"""The builders' operations as Triton kernels, one idea a file; importing this imports Triton."""

from .compress_slots import compress_slots
from .expand_rows import expand_rows
from .settle_states import settle_states
from .state_ids import state_ids
from .step_drafts import step_drafts
from .token_lens import token_lens

__all__ = [
    "compress_slots",
    "expand_rows",
    "settle_states",
    "state_ids",
    "step_drafts",
    "token_lens",
]
