"""The check a builder makes before it launches anything: is this the batch of my plan?"""

from __future__ import annotations

import torch

from bt_width import (
    BlockTableLayout,
    InvalidEditError,
    InvalidSpecError,
    RowOverflowError,
    WidthMismatchError,
)

from ..arguments import indexed_device, require_layout
from .checks import require_tensor
from .common import CommonAttentionMetadata

_HOST = torch.device("cpu")
_ON_HOST = frozenset({"query_start_loc_host", "seq_lens_upper_bound_host", "is_prefilling"})
_INT32_OF_REQUEST = (
    "seq_lens",
    "seq_lens_upper_bound_host",
    "local_seq_lens",
    "num_computed_tokens",
    "num_accepted_tokens",
)


class BatchGuard:
    """Refuses a batch whose tensors are not those that a builder was planned for.

    The planned numbers are taken from the layout once. A check reads what lies on the
    host, and of the device's tensors what the host knows of them: no element.

    Attributes:
        layout: The group's plan.
        device: Where the batch lies, with its index.
    """

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        """Plan for the batches of ``layout`` on ``device``.

        Raises:
            InvalidSpecError: One of them is no such thing.
        """
        require_layout(layout)
        self.layout = layout
        self.device = indexed_device(device)
        self._width = layout.width
        self._max_num_reqs = layout.limits.max_num_reqs
        self._max_num_tokens = layout.limits.max_num_batched_tokens
        self._max_request_len = layout.limits.max_tokens

    def check(self, common: CommonAttentionMetadata) -> None:
        """Refuse ``common`` unless every tensor is as planned.

        Raises:
            WidthMismatchError: It was planned otherwise, or a tensor has other rows,
                columns, dtype, device or strides; the message holds both derivations.
            InvalidEditError: It has more rows or tokens than the plan allows, or its
                numbers on the host contradict each other.
            RowOverflowError: A request is longer than a row was planned for.
            InvalidSpecError: It is no batch.
        """
        require_common(common)
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
        self._check_host_numbers(common)

    def _check_counts(self, common: CommonAttentionMetadata) -> None:
        counts = (
            ("num_reqs", common.num_reqs, self._max_num_reqs),
            ("num_tokens", common.num_tokens, self._max_num_tokens),
            ("max_query_len", common.max_query_len, self._max_num_tokens),
        )
        for name, count, limit in counts:
            if type(count) is not int or not 0 <= count <= limit:
                raise InvalidEditError(
                    f"{name} must be an int in 0..{limit}, the limit planned for, not {count!r}",
                    name=name,
                    count=count,
                    limit=limit,
                )
        longest, limit = common.max_seq_len, self._max_request_len
        if type(longest) is not int or not 0 <= longest <= limit:
            raise RowOverflowError(
                f"max_seq_len must be an int in 0..{limit}, what a row is planned for, "
                f"not {longest!r}: {self.layout.explain()}",
                max_seq_len=longest,
                max_tokens=limit,
            )

    def _check_host_numbers(self, common: CommonAttentionMetadata) -> None:
        """Refuse starts that do not ascend, and bounds that are none."""
        starts = common.query_start_loc_host.numpy()
        query_lens = starts[1:] - starts[:-1]
        bounds = common.seq_lens_upper_bound_host.numpy()
        ascend = starts[0] == 0 and starts[-1] <= common.num_tokens
        if not ascend or query_lens.min(initial=0) < 0:
            raise InvalidEditError(
                f"query_start_loc_host must ascend from 0 to at most {common.num_tokens}, "
                f"it is {starts.tolist()}",
                query_start_loc=starts.tolist(),
            )
        facts = (
            ("max_query_len", query_lens.max(initial=0), common.max_query_len),
            ("max_seq_len", bounds.max(initial=0), common.max_seq_len),
        )
        for name, found, stated in facts:
            if found > stated:
                raise InvalidEditError(
                    f"{name} is {stated}, but a request has {found}", name=name, found=int(found)
                )
        if (bounds < query_lens).any():
            raise InvalidEditError(
                "a request has more tokens in this step than seq_lens_upper_bound_host in all: "
                f"{query_lens.tolist()} and {bounds.tolist()}",
                query_lens=query_lens.tolist(),
                bounds=bounds.tolist(),
            )

    def _check_table(self, common: CommonAttentionMetadata) -> None:
        require_tensor(
            "block_table",
            common.block_table,
            shape=(common.num_reqs, self._width),
            dtype=torch.int32,
            device=self.device,
            derivation=self._derivation,
        )

    def _derivation(self) -> str:
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


def require_common(common: object) -> None:
    """Refuse anything but a batch that holds a layout."""
    if not isinstance(common, CommonAttentionMetadata):
        raise InvalidSpecError(
            f"a batch must be CommonAttentionMetadata, not {type(common).__name__}", value=common
        )
    require_layout(common.layout)
