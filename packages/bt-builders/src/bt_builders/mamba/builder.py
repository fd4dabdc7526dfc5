"""Mamba's metadata: which states each request reads and writes, and how its scan is cut."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import BlockTableLayout, InvalidEditError

from ..batch.checks import require_tensor
from ..batch.common import CommonAttentionMetadata
from ..batch.guard import BatchGuard
from ..batch.split import BatchSplit, query_lens_of, split_at
from ..batch.transfer import to_device
from ..configured import with_options
from ..devices import operations_for
from .chunks import cut_chunks
from .metadata import (
    MambaChunks,
    MambaDecodeMetadata,
    MambaMetadata,
    MambaPrefillMetadata,
    MambaStates,
    SettledStates,
)
from .options import MambaOptions
from .states import StatePart


class MambaMetadataBuilder:
    """Builds a recurrent group's metadata; its states' ids stand in own buffers.

    A row decodes if it has a state and either one token or one and its drafts; a prompt
    of several tokens prefills, however short.

    Attributes:
        options: What the backend's kernels want; see ``configured``.
    """

    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["uniform"]] = "uniform"
    options: ClassVar[MambaOptions] = MambaOptions()

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        """Allocate for the largest step that ``layout`` allows.

        Raises:
            InvalidSpecError: The group keeps no recurrent state, or fewer speculative
                states than there are draft tokens.
        """
        self.layout = layout
        self._guard = BatchGuard(layout, device)
        self._device = self._guard.device
        self._max_decode_len = 1 + layout.limits.num_speculative_tokens
        self._states = StatePart(
            layout, self._device, operations_for(self._device), self.options.state_pad
        )
        nothing = np.zeros(0, dtype=np.int32)
        self._no_chunks = self._chunks(nothing, nothing)
        self._no_starts = torch.zeros(1, dtype=torch.int32, device=self._device)

    @classmethod
    def configured(cls, options: MambaOptions) -> type[Self]:
        """Return this builder's class with other ``options``.

        Raises:
            InvalidSpecError: They are no ``MambaOptions``.
        """
        return with_options(cls, options, MambaOptions)

    def build(self, common: CommonAttentionMetadata) -> MambaMetadata:
        """Return the metadata of one step; valid until the next one is built.

        Raises:
            WidthMismatchError: A tensor of ``common`` is not as planned; nothing changed.
            InvalidEditError: The batch is larger than planned, or a request with drafts
                stands behind one that prefills; nothing changed.
            RowOverflowError: A request is longer than a row was planned for; nothing changed.
        """
        self._guard.check(common)
        split = self._split(common)
        states = self._states.build(common)
        return MambaMetadata(
            states=states,
            decode=MambaDecodeMetadata(
                num_reqs=split.num_decodes,
                num_tokens=split.num_decode_tokens,
                max_query_len=split.decode_query_len,
                query_start_loc=common.query_start_loc[: split.num_decodes + 1],
                states=_rows_of(states, slice(split.num_decodes)),
            ),
            prefill=self._build_prefill(common, split, states),
        )

    def settle(
        self, common: CommonAttentionMetadata, num_accepted_tokens: torch.Tensor
    ) -> SettledStates:
        """Return what to copy once it is known how many tokens of ``common`` stay.

        Args:
            common: The step's batch.
            num_accepted_tokens: [N] int32; tokens of this step that stay, the sampled one
                of a decode included.

        Raises:
            WidthMismatchError: A tensor is not as planned.
            InvalidEditError: As for ``build``.
            RowOverflowError: As for ``build``.
        """
        self._guard.check(common)
        require_tensor(
            "num_accepted_tokens",
            num_accepted_tokens,
            shape=(common.num_reqs,),
            dtype=torch.int32,
            device=self._device,
        )
        return self._states.settle(common, self._split(common).num_decodes, num_accepted_tokens)

    def _split(self, common: CommonAttentionMetadata) -> BatchSplit:
        query_lens = query_lens_of(common)
        has_state = common.seq_lens_upper_bound_host.numpy() > query_lens
        is_prefilling = common.is_prefilling.numpy()
        decodes = (query_lens == 0) | (
            has_state & (query_lens <= self._max_decode_len) & (~is_prefilling | (query_lens == 1))
        )
        split = split_at(common, query_lens, decodes)
        behind = slice(split.num_decodes, None)
        if (~is_prefilling[behind] & (query_lens[behind] > 1)).any():
            raise InvalidEditError(
                f"a request with drafts stands behind row {split.num_decodes}, which prefills; "
                "its drafts' states would be lost: put all decodes before all prefills",
                first_prefill=split.num_decodes,
            )
        return split

    def _build_prefill(
        self, common: CommonAttentionMetadata, split: BatchSplit, states: MambaStates
    ) -> MambaPrefillMetadata:
        reqs, num_reqs = split.prefill_reqs, split.num_prefills
        starts = self._no_starts
        if num_reqs:
            starts = common.query_start_loc[reqs.start : reqs.stop + 1] - split.num_decode_tokens
        query_lens = query_lens_of(common)[reqs]
        lens = common.seq_lens_upper_bound_host.numpy()[reqs]
        return MambaPrefillMetadata(
            first_req=reqs.start,
            num_reqs=num_reqs,
            first_token=split.num_decode_tokens,
            num_tokens=split.num_prefill_tokens,
            query_start_loc=starts,
            states=_rows_of(states, reqs),
            chunks=self._chunks(query_lens, lens - query_lens) if num_reqs else self._no_chunks,
        )

    def _chunks(
        self, query_lens: NDArray[np.int32], num_computed: NDArray[np.int32]
    ) -> MambaChunks:
        cut = cut_chunks(query_lens, num_computed, self.options.chunk_size)
        # one copy to the device instead of three
        numbers = to_device(np.concatenate(cut), self._device)
        starts_end, lasts_end = np.cumsum([cut.cu_chunk_seqlens.size, cut.last_chunk_indices.size])
        return MambaChunks(
            cu_chunk_seqlens=numbers[:starts_end],
            last_chunk_indices=numbers[starts_end:lasts_end],
            seq_idx=numbers[lasts_end:],
        )


def _rows_of(states: MambaStates, rows: slice) -> MambaStates:
    return MambaStates(
        source_ids=states.source_ids[rows],
        state_ids=states.state_ids[rows],
        num_accepted_tokens=states.num_accepted_tokens[rows],
        has_initial_states=states.has_initial_states[rows],
        copies=states.copies[rows],
    )
