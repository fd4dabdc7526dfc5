"""Defines one step's batch as all cache groups share it, and makes it from lengths on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from bt_width import InvalidEditError

from ._checks import indexed_device

HostInts: TypeAlias = Sequence[int] | NDArray[np.integer] | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """One step's batch as all cache groups share it: what does not depend on a group.

    The fields are those of ``CommonAttentionMetadata``, where they are described.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    query_start_loc_host: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_upper_bound_host: torch.Tensor
    num_computed_tokens: torch.Tensor
    num_accepted_tokens: torch.Tensor
    is_prefilling: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def from_lengths(
        cls,
        num_computed_tokens: HostInts,
        query_lens: HostInts,
        is_prefilling: Sequence[bool] | torch.Tensor,
        device: torch.device | str,
        *,
        num_accepted_tokens: HostInts | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
    ) -> AttentionBatch:
        """Return the batch of requests whose lengths the host knows.

        An engine that keeps the batch's arrays on the device makes its ``AttentionBatch``
        of those instead; this copies five small arrays.

        Args:
            num_computed_tokens: [N] ints on the host; tokens of each request before this step.
            query_lens: [N] ints on the host; its tokens in this step, drafts included.
            is_prefilling: [N] bools; whether these tokens were given.
            device: Where the batch lies.
            num_accepted_tokens: [N] ints; tokens of the last step that stayed; 1 without.
            num_reqs_padded: Rows of the batch, padding included.
            num_tokens_padded: Tokens of the batch, padding included.

        Raises:
            InvalidEditError: The arrays differ in length, hold what is not an int32 or a negative
                number, or a padded count is below the real one.
            InvalidSpecError: ``device`` cannot be used.
        """
        where = indexed_device(device)
        computed = _host_ints("num_computed_tokens", num_computed_tokens)
        queries = _host_ints("query_lens", query_lens)
        num_reqs, num_tokens = computed.size, int(queries.sum())
        given = [1] * num_reqs if num_accepted_tokens is None else num_accepted_tokens
        accepted = _host_ints("num_accepted_tokens", given)
        prefilling = torch.as_tensor(is_prefilling).to(torch.bool)
        sizes = {"query_lens": queries.size, "num_accepted_tokens": accepted.size}
        for name, size in {**sizes, "is_prefilling": prefilling.numel()}.items():
            if size != num_reqs:
                raise InvalidEditError(
                    f"{name} has {size} entries, num_computed_tokens has {num_reqs}",
                    name=name,
                    size=size,
                    num_reqs=num_reqs,
                )
        rows = _padded_count("num_reqs_padded", num_reqs_padded, num_reqs)
        tokens = _padded_count("num_tokens_padded", num_tokens_padded, num_tokens)
        starts = np.zeros(rows + 1, dtype=np.int32)
        starts[1 : num_reqs + 1] = queries.cumsum()
        starts[num_reqs + 1 :] = num_tokens
        lens = computed + queries
        positions = np.full(tokens, -1, dtype=np.int64)
        positions[:num_tokens] = np.arange(num_tokens) + (computed - starts[:num_reqs]).repeat(
            queries
        )
        is_given = torch.zeros(rows, dtype=torch.bool)
        is_given[:num_reqs] = prefilling
        starts_host = torch.from_numpy(starts)
        lens_host = _padded(lens, rows, 0)
        return cls(
            num_reqs=rows,
            num_tokens=tokens,
            max_query_len=int(queries.max(initial=0)),
            max_seq_len=int(lens.max(initial=0)),
            query_start_loc=starts_host.to(where),
            query_start_loc_host=starts_host,
            seq_lens=lens_host.to(where),
            seq_lens_upper_bound_host=lens_host,
            num_computed_tokens=_padded(computed, rows, 0).to(where),
            num_accepted_tokens=_padded(accepted, rows, 1).to(where),
            is_prefilling=is_given,
            positions=torch.from_numpy(positions).to(where),
        )


def _host_ints(name: str, values: HostInts) -> NDArray[np.int64]:
    """Return ``values`` as int64, once it is known that each is an int32 that counts something."""
    found = np.asarray(values)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise InvalidEditError(
            f"{name} must be a list or an array of ints with one dimension", name=name
        )
    ints = found.astype(np.int64)
    if ints.min(initial=0) < 0 or ints.max(initial=0) > np.iinfo(np.int32).max:
        raise InvalidEditError(f"{name} must hold counts in 0..2**31 - 1", name=name)
    return ints


def _padded_count(name: str, padded: int | None, real: int) -> int:
    if padded is None:
        return real
    if type(padded) is not int or padded < real:
        raise InvalidEditError(
            f"{name} must be an int of at least {real}, what the batch holds, not {padded!r}",
            name=name,
            padded=padded,
            real=real,
        )
    return padded


def _padded(values: NDArray[np.int64], size: int, fill: int) -> torch.Tensor:
    """Return ``values`` as int32 with ``fill`` behind them, on the host."""
    padded = np.full(size, fill, dtype=np.int32)
    padded[: values.size] = values
    return torch.from_numpy(padded)
