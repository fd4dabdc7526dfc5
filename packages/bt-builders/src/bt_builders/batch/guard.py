"""The check a builder makes before it launches anything: is this the batch of my plan?"""

from __future__ import annotations

import torch

from bt_width import BlockTableLayout, InvalidEditError, WidthMismatchError

from .checks import indexed_device, require_tensor
from .common import CommonAttentionMetadata

_HOST = torch.device("cpu")


class BatchGuard:
    """Refuses a batch whose tensors are not those that a builder was planned for.

    The planned numbers are taken from the layout once, so that a check costs the host
    a few comparisons and the device nothing.
    """

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        """Plan for the batches of ``layout`` on ``device``."""
        self.layout = layout
        self.device = indexed_device(device)
        self.width = layout.width
        self.max_num_reqs = layout.limits.max_num_reqs
        self.max_num_tokens = layout.limits.max_num_batched_tokens

    def check(self, common: CommonAttentionMetadata) -> None:
        """Refuse ``common`` unless every tensor is as planned.

        Raises:
            WidthMismatchError: It was planned otherwise, or a tensor has other rows,
                columns, dtype, device or strides; the message holds both derivations.
            InvalidEditError: It has more rows or tokens than the plan allows.
        """
        if common.layout is not self.layout and common.layout != self.layout:
            raise WidthMismatchError(
                "the batch and the builder were planned differently: "
                f"the batch: {common.layout.explain()}; the builder: {self.layout.explain()}",
                batch=common.layout,
                builder=self.layout,
            )
        self._check_counts(common)
        self._check_table(common)
        num_reqs, num_tokens = common.num_reqs, common.num_tokens
        for name in ("query_start_loc", "query_start_loc_host"):
            self._check_vector(common, name, num_reqs + 1, torch.int32)
        for name in _INT32_OF_REQUEST:
            self._check_vector(common, name, num_reqs, torch.int32)
        self._check_vector(common, "is_prefilling", num_reqs, torch.bool)
        for name in ("positions", "slot_mapping"):
            self._check_vector(common, name, num_tokens, torch.int64)

    def _check_counts(self, common: CommonAttentionMetadata) -> None:
        counts = (
            ("num_reqs", common.num_reqs, self.max_num_reqs),
            ("num_tokens", common.num_tokens, self.max_num_tokens),
        )
        for name, count, limit in counts:
            if not 0 <= count <= limit:
                raise InvalidEditError(
                    f"{name} {count} must lie in 0..{limit}, the limit planned for",
                    name=name,
                    count=count,
                    limit=limit,
                )

    def _check_table(self, common: CommonAttentionMetadata) -> None:
        require_tensor(
            "block_table",
            common.block_table,
            shape=(common.num_reqs, self.width),
            dtype=torch.int32,
            device=self.device,
            derivation=self._derivations,
        )

    def _derivations(self) -> str:
        return f"the builder's columns are those of its layout: {self.layout.explain()}"

    def _check_vector(
        self, common: CommonAttentionMetadata, name: str, length: int, dtype: torch.dtype
    ) -> None:
        tensor: object = getattr(common, name)
        require_tensor(
            name,
            tensor,
            shape=(length,),
            dtype=dtype,
            device=_HOST if name in _ON_HOST else self.device,
        )


_ON_HOST = frozenset({"query_start_loc_host", "seq_lens_upper_bound_host", "is_prefilling"})
_INT32_OF_REQUEST = (
    "seq_lens",
    "seq_lens_upper_bound_host",
    "local_seq_lens",
    "num_computed_tokens",
    "num_accepted_tokens",
)
