"""The device work of the builders as one interface; it knows no implementation.

Every operation writes into tensors that its caller owns, and reads nothing back to
the host. N requests, T tokens, W columns, S states of a request.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from .batch.geometry import RowGeometry


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


class StateGeometry(NamedTuple):
    """How a recurrent group's states lie in its rows.

    Attributes:
        width: Columns of a row.
        tokens_per_column: Tokens between two kept states, or 0 where only one is kept.
        num_states: States a step may write: one, and one more for each draft.
        pad: What stands for the null state in the ids given to a kernel.
    """

    width: int
    tokens_per_column: int
    num_states: int
    pad: int


class StateBatch(NamedTuple):
    """What the state columns of a step follow from.

    Attributes:
        block_table: [N, W] int32.
        num_computed_tokens: [N] int32.
        seq_lens: [N] int32; 0 for a padding row.
        num_accepted_tokens: [N] int32.
    """

    block_table: torch.Tensor
    num_computed_tokens: torch.Tensor
    seq_lens: torch.Tensor
    num_accepted_tokens: torch.Tensor


class StateRows(NamedTuple):
    """Where the state ids of a step go.

    Attributes:
        source_ids: [N] int32; the state to start from; the pad where there is none.
        state_ids: [N, S] int32; where the state goes after the first token, the second...
        num_accepted_tokens: [N] int32; the column of ``state_ids`` that holds the source,
            plus 1: 1 where the source lies elsewhere and has to be copied to column 0.
        has_initial_states: [N] bool; whether there is a state to start from.
        copies: [N] bool; whether that state lies outside ``state_ids``.
    """

    source_ids: torch.Tensor
    state_ids: torch.Tensor
    num_accepted_tokens: torch.Tensor
    has_initial_states: torch.Tensor
    copies: torch.Tensor


class SettledRows(NamedTuple):
    """Where the copies go that a step's accepted tokens call for.

    Attributes:
        source_ids: [N] int32; the state to keep; the pad where nothing is copied.
        target_ids: [N] int32; where the next step looks for it, likewise.
        num_accepted_tokens: [N] int32; the next step's.
    """

    source_ids: torch.Tensor
    target_ids: torch.Tensor
    num_accepted_tokens: torch.Tensor


class Operations(Protocol):
    """What builders launch; the module ``reference`` is one, ``kernels`` the other."""

    def token_lens(
        self,
        geometry: RowGeometry,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        out: TokenLens,
    ) -> None:
        """Write what each token of requests [N] sees; 0 for tokens past the last request."""

    def expand_rows(
        self,
        geometry: RowGeometry,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        lens: TokenLens,
        rows: ExpandedRows,
    ) -> None:
        """Write ``lens`` as ``token_lens`` does, and each token's copy of its request's row."""

    def compress_slots(
        self,
        geometry: RowGeometry,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the slot of the state that each token [T] completes, else ``PAD_SLOT``."""

    def step_drafts(
        self, geometry: RowGeometry, block_table: torch.Tensor, drafts: DraftRows, step: int
    ) -> None:
        """Move ``drafts`` on by ``step`` tokens, 0 or 1, in place."""

    def state_ids(self, geometry: StateGeometry, batch: StateBatch, out: StateRows) -> None:
        """Write where each request's state comes from and goes to."""

    def settle_states(self, geometry: StateGeometry, batch: StateBatch, out: SettledRows) -> None:
        """Write which state each decode has to copy, once its accepted tokens are known."""
