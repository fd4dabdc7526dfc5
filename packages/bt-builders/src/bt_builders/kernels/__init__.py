"""The builders' operations as Triton kernels; importing this imports Triton."""

from .states import commit_states, state_ids
from .tokens import compress_slots, expand_rows, step_drafts, token_lens

__all__ = [
    "commit_states",
    "compress_slots",
    "expand_rows",
    "state_ids",
    "step_drafts",
    "token_lens",
]
