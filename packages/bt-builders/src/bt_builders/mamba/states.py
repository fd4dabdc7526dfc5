"""A recurrent group's state ids, in buffers of their own: one row a request."""

from __future__ import annotations

import torch

from bt_width import BlockTableLayout, InvalidSpecError, MambaSpec
from bt_width.specs import layers_of

from ..batch.common import CommonAttentionMetadata
from ..operations import Operations, SettledRows, StateBatch, StateGeometry, StateRows
from .metadata import MambaStates, SettledStates


class StatePart:
    """Finds the states that a step reads and writes."""

    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        operations: Operations,
        state_pad: int,
    ) -> None:
        """Allocate one row for each request the limits allow.

        Raises:
            InvalidSpecError: The group keeps no recurrent state, or fewer speculative
                states than there are draft tokens.
        """
        self._operations = operations
        spec = _mamba_spec_of(layout)
        num_reqs = layout.limits.max_num_reqs
        self._geometry = geometry = StateGeometry(
            width=layout.width,
            tokens_per_column=spec.block_size if spec.mode == "align" else 0,
            num_states=1 + spec.num_speculative_blocks,
            pad=state_pad,
        )
        ints = torch.zeros(4, num_reqs, dtype=torch.int32, device=device)
        bools = torch.zeros(2, num_reqs, dtype=torch.bool, device=device)
        self._rows = StateRows(
            source_ids=ints[0],
            state_ids=torch.zeros(num_reqs, geometry.num_states, dtype=torch.int32, device=device),
            num_accepted_tokens=ints[1],
            has_initial_states=bools[0],
            copies=bools[1],
        )
        self._settled = SettledRows(ints[2], ints[3], torch.ones_like(ints[0]))

    def build(self, common: CommonAttentionMetadata) -> MambaStates:
        """Return the states of every row of ``common``."""
        rows = StateRows(*(buffer[: common.num_reqs] for buffer in self._rows))
        batch = StateBatch(
            common.block_table,
            common.num_computed_tokens,
            common.seq_lens,
            common.num_accepted_tokens,
        )
        self._operations.state_ids(self._geometry, batch, rows)
        return MambaStates(**rows._asdict())

    def settle(
        self, common: CommonAttentionMetadata, num_decodes: int, num_accepted: torch.Tensor
    ) -> SettledStates:
        """Return the copies of the first ``num_decodes`` rows; the others need none."""
        leading = SettledRows(*(buffer[:num_decodes] for buffer in self._settled))
        batch = StateBatch(
            common.block_table[:num_decodes],
            common.num_computed_tokens[:num_decodes],
            common.seq_lens[:num_decodes],
            num_accepted[:num_decodes],
        )
        self._operations.settle_states(self._geometry, batch, leading)
        pads = (self._geometry.pad, self._geometry.pad, 1)
        for buffer, pad in zip(self._settled, pads, strict=True):
            buffer[num_decodes : common.num_reqs].fill_(pad)
        return SettledStates(
            **{name: buffer[: common.num_reqs] for name, buffer in self._settled._asdict().items()}
        )


def _mamba_spec_of(layout: BlockTableLayout) -> MambaSpec:
    """Return the spec that a recurrent group's layers share.

    Raises:
        InvalidSpecError: The group is of another kind, or has fewer speculative states
            than the limits have draft tokens.
    """
    spec = layers_of(layout.spec)[0]
    if not isinstance(spec, MambaSpec):
        raise InvalidSpecError(
            f"a Mamba builder needs a group of recurrent states, not of kind {layout.kind}",
            layout=layout,
        )
    num_drafts = layout.limits.num_speculative_tokens
    if spec.num_speculative_blocks < num_drafts:
        raise InvalidSpecError(
            f"{num_drafts} draft tokens need as many speculative states, the spec has "
            f"{spec.num_speculative_blocks}: give MambaSpec num_speculative_blocks={num_drafts}",
            num_speculative_tokens=num_drafts,
            num_speculative_blocks=spec.num_speculative_blocks,
        )
    return spec
