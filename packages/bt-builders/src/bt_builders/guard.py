"""Checks a batch against the plan of its group; once per group and step."""

from __future__ import annotations

import numpy as np
import torch

from bt_width import (
    BlockTableLayout,
    InvalidEditError,
    RowOverflowError,
    WidthMismatchError,
)

from ._checks import indexed_device, require_layout, require_tensor
from .common import (
    CommonAttentionMetadata,
    GuardMark,
    QueryLens,
    count_query_lens,
    require_common,
)

_HOST = torch.device("cpu")


class BatchGuard:
    """Refuses a batch whose tensors are not those that a builder was planned for.

    The planned numbers are taken from the layout once. A check reads what lies on the
    host, and of the device's tensors what the host knows of them: no element.

    Any thread may use it: it keeps nothing of a batch.

    Attributes:
        layout: The group's plan.
        device: Where the batch lies, with its index.
    """

    def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
        """Plan for the batches of ``layout`` on ``device``.

        Raises:
            InvalidSpecError: ``layout`` is not a layout, or ``device`` cannot be used.
        """
        require_layout(layout)
        self.layout = layout
        self.device = indexed_device(device)
        self._width = layout.width
        self._max_num_reqs = layout.limits.max_num_reqs
        self._max_num_tokens = layout.limits.max_num_batched_tokens
        self._max_request_len = layout.limits.max_tokens

    def check(self, common: CommonAttentionMetadata) -> None:
        """Refuse ``common`` unless every tensor is as planned; one that passed is not read again.

        Raises:
            WidthMismatchError: It was planned otherwise, or a tensor has other rows,
                columns, dtype, device or strides; the message holds both derivations.
            InvalidEditError: It has more rows or tokens than the plan allows, or its
                numbers on the host contradict each other.
            RowOverflowError: A request is longer than a row was planned for.
            InvalidSpecError: It is not a batch.
        """
        mark = getattr(common, "_mark", None)
        if mark is not None and mark.layout is self.layout and mark.device == self.device:
            return
        require_common(common)
        if common.layout is not self.layout and common.layout != self.layout:
            raise WidthMismatchError(
                "the batch and the builder were planned differently: "
                f"the batch: {common.layout.explain()}; the builder: {self.layout.explain()}",
                batch=common.layout,
                builder=self.layout,
            )
        self._check_counts(common)
        self._check_tensors(common)
        query_lens = self._check_host_numbers(common)
        object.__setattr__(common, "_mark", GuardMark(self.layout, self.device, query_lens))

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

    def _check_host_numbers(self, common: CommonAttentionMetadata) -> QueryLens:
        """Return the tokens of each row, once starts ascend and bounds are bounds."""
        starts = common.query_start_loc_host.numpy()
        bounds = common.seq_lens_upper_bound_host.numpy()
        query_lens = count_query_lens(common)
        if starts[0] != 0 or starts[-1] > common.num_tokens or query_lens.shortest < 0:
            raise InvalidEditError(
                f"query_start_loc_host must ascend from 0 to at most {common.num_tokens}, "
                f"it is {starts.tolist()}",
                query_start_loc=starts.tolist(),
            )
        stated_counts = (
            ("max_query_len", query_lens.longest, common.max_query_len),
            ("max_seq_len", np.maximum.reduce(bounds, initial=0), common.max_seq_len),
        )
        for name, found, stated in stated_counts:
            if found > stated:
                raise InvalidEditError(
                    f"{name} is {stated}, but a request has {found}", name=name, found=int(found)
                )
        if np.count_nonzero(bounds < query_lens.of_rows):
            raise InvalidEditError(
                "a request has more tokens in this step than seq_lens_upper_bound_host in all: "
                f"{query_lens.of_rows.tolist()} and {bounds.tolist()}",
                query_lens=query_lens.of_rows.tolist(),
                bounds=bounds.tolist(),
            )
        return query_lens

    def _check_tensors(self, common: CommonAttentionMetadata) -> None:
        """Refuse a tensor of another shape, dtype, device or stride than planned."""
        reqs, tokens = (common.num_reqs,), (common.num_tokens,)
        starts, table = (common.num_reqs + 1,), (common.num_reqs, self._width)
        # the table first: its message says how the width came about
        self._check(common.block_table, "block_table", table, torch.int32, self.device)
        self._check(common.query_start_loc, "query_start_loc", starts, torch.int32, self.device)
        self._check(common.query_start_loc_host, "query_start_loc_host", starts, torch.int32, _HOST)
        self._check(common.seq_lens, "seq_lens", reqs, torch.int32, self.device)
        self._check(
            common.seq_lens_upper_bound_host, "seq_lens_upper_bound_host", reqs, torch.int32, _HOST
        )
        self._check(common.local_seq_lens, "local_seq_lens", reqs, torch.int32, self.device)
        self._check(
            common.num_computed_tokens, "num_computed_tokens", reqs, torch.int32, self.device
        )
        self._check(
            common.num_accepted_tokens, "num_accepted_tokens", reqs, torch.int32, self.device
        )
        self._check(common.is_prefilling, "is_prefilling", reqs, torch.bool, _HOST)
        self._check(common.positions, "positions", tokens, torch.int64, self.device)
        self._check(common.slot_mapping, "slot_mapping", tokens, torch.int64, self.device)

    def _check(
        self,
        tensor: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if (
            type(tensor) is torch.Tensor
            and tensor.shape == shape
            and tensor.dtype is dtype
            and tensor.device == device
            and tensor.is_contiguous()
        ):
            return
        derivation = self._derivation if name == "block_table" else None
        require_tensor(name, tensor, shape=shape, dtype=dtype, device=device, derivation=derivation)

    def _derivation(self) -> str:
        return f"the builder's columns are those of its layout: {self.layout.explain()}"
