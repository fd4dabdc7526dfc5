"""Describes the device work of the builders as one interface; it knows no implementation.

Every operation writes into tensors that its caller owns, and reads nothing back to
the host. N requests, T tokens, W columns, S states of a request.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from bt_width import Addressing


class TokenLens(NamedTuple):
    """Where per-token lengths go: what a token sees, itself included.

    Attributes:
        seq_lens: [T] int32; tokens on all ranks.
        local_lens: [T] int32; states on this rank.
    """

    seq_lens: torch.Tensor
    local_lens: torch.Tensor


class ExpandedRows(NamedTuple):
    """Where a table with one row per token goes.

    Attributes:
        table: [T, W] int32; a row's live columns, then ``NULL_BLOCK``.
        num_live: [T] int32; columns that are not null now, so that the next step clears
            no more than those.
    """

    table: torch.Tensor
    num_live: torch.Tensor


class DraftRows(NamedTuple):
    """The draft steps' own lengths and slots, one token a request; read and written.

    Attributes:
        seq_lens: [N] int32; tokens on all ranks, 0 for a padding row.
        local_lens: [N] int32; states on this rank.
        positions: [N] int64; the token's place, -1 for a padding row.
        slot_mapping: [N] int64; the slot of the state that the token completes.
    """

    seq_lens: torch.Tensor
    local_lens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


class StateBatch(NamedTuple):
    """What the state columns of a step follow from.

    Attributes:
        block_table: [N, W] int32.
        num_computed_tokens: [N] int32.
        seq_lens: [N] int32; 0 for a padding row.
        num_accepted_tokens: [N] int32; of the step before.
    """

    block_table: torch.Tensor
    num_computed_tokens: torch.Tensor
    seq_lens: torch.Tensor
    num_accepted_tokens: torch.Tensor


class MambaStates(NamedTuple):
    """Where the states of some requests (N) come from and go to; the pad stands for none.

    A kernel that reads one place and writes another takes ``source_ids`` and
    ``state_ids``. A kernel that works in place takes ``state_ids`` and
    ``num_accepted_tokens``, after a copy of ``source_ids`` to ``state_ids[:, 0]`` where
    ``copies`` says so.

    Attributes:
        source_ids: [N] int32; the state to start from; the pad for a new request.
        state_ids: [N, 1 + drafts] int32; where the state after each token goes. A
            request that prefills writes its last state to the first.
        num_accepted_tokens: [N] int32; one more than the column of ``state_ids`` that
            holds the state to start from.
        has_initial_states: [N] bool; whether there is a state to start from.
        copies: [N] bool; whether that state lies outside ``state_ids``.
    """

    source_ids: torch.Tensor
    state_ids: torch.Tensor
    num_accepted_tokens: torch.Tensor
    has_initial_states: torch.Tensor
    copies: torch.Tensor


class CommittedStates(NamedTuple):
    """What to copy once it is known which of a step's tokens stay; at most C states a request.

    In mode "align" a state that ends a block, or that a later step looks for in an earlier
    column, is copied there. All sources are read before the first target is written, or a
    request's copies are made from left to right. The pad stands for "nothing to copy" in
    both ids.

    Attributes:
        source_ids: [N, C] int32.
        target_ids: [N, C] int32.
        num_accepted_tokens: [N] int32; what the next step's batch has to say.
    """

    source_ids: torch.Tensor
    target_ids: torch.Tensor
    num_accepted_tokens: torch.Tensor


class Operations(Protocol):
    """What builders launch; the module ``reference`` is one, ``kernels`` the other.

    Numbers that come from the device and lead to a column are clamped to what the group
    is planned for.
    """

    def token_lens(
        self,
        addressing: Addressing,
        tokens_per_state: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        out: TokenLens,
    ) -> None:
        """Write what each token of requests [N] sees; 0 for tokens past the last request."""

    def expand_rows(
        self,
        addressing: Addressing,
        tokens_per_state: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        lens: TokenLens,
        rows: ExpandedRows,
    ) -> None:
        """Write ``lens`` as ``token_lens`` does, and each token's copy of its request's row."""

    def compress_slots(
        self,
        tokens_per_state: int,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the slot of the state that each token [T] completes, else ``PAD_SLOT``."""

    def step_drafts(
        self,
        addressing: Addressing,
        tokens_per_state: int,
        block_table: torch.Tensor,
        drafts: DraftRows,
        step: int,
    ) -> None:
        """Move ``drafts`` on by ``step`` tokens, 0 or 1, in place."""

    def state_ids(
        self, addressing: Addressing, pad: int, batch: StateBatch, out: MambaStates
    ) -> None:
        """Write where each request's state comes from and goes to; ``pad`` is no state."""

    def commit_states(
        self,
        addressing: Addressing,
        pad: int,
        batch: StateBatch,
        accepted: torch.Tensor,
        out: CommittedStates,
    ) -> None:
        """Write which states each decode has to copy, once its ``accepted`` tokens are known."""
