"""One step as the model's layers see it: tokens, each group's metadata, and where states lie.

D requests decode, in lines of L tokens; P requests prefill T tokens, in chunks of S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from bt_builders import (
    CommonAttentionMetadata,
    MambaDecodeMetadata,
    MambaMetadata,
    MambaPrefillMetadata,
    MambaStates,
)
from bt_runner.errors import RunnerError
from bt_runner.models.caches import CHUNK_SIZE, MAMBA
from bt_runner.models.layers.numerics import Rope, Rotation
from bt_width import NULL_BLOCK


class _Sources:
    """The states that requests start from."""

    def __init__(self, states: MambaStates, common: CommonAttentionMetadata, reqs: slice) -> None:
        self._states = states
        # known on the host: a state is large, and to mask it takes longer than to read it
        starts = common.query_start_loc_host
        query_lens = (starts[1:] - starts[:-1])[reqs]
        lens = common.seq_lens_upper_bound_host[reqs]
        self._are_all_there = bool(((lens > query_lens) | (query_lens == 0)).all())

    def __call__(self, cache: Tensor) -> Tensor:
        """Return each request's state, zero where it starts from nothing."""
        found = cache.index_select(0, self._states.source_ids)
        if self._are_all_there:
            return found
        is_there = self._states.has_initial_states.view(-1, *(1,) * (cache.dim() - 1))
        return found.masked_fill_(~is_there, 0)


class DecodePlaces:
    """The tokens of requests that decode, a line for each.

    Attributes:
        source: Gives the states that requests start from.
        state_ids: ``[D * L]``, where each token's state is kept; null where a line has no token.
    """

    def __init__(self, part: MambaDecodeMetadata, common: CommonAttentionMetadata) -> None:
        """Compute the places; a batch in which all have as many tokens needs none."""
        self.source = _Sources(part.states, common, slice(part.num_reqs))
        self._shape = (part.num_reqs, part.max_query_len)
        starts, ends = part.query_start_loc[:-1, None], part.query_start_loc[1:, None]
        tokens = starts + torch.arange(part.max_query_len, device=starts.device)
        ids = part.states.state_ids[:, : part.max_query_len]
        self.state_ids = ids.where(tokens < ends, NULL_BLOCK).flatten()
        self._is_uniform = part.is_uniform
        if not part.is_uniform:
            self._tokens = tokens.clamp(max=part.num_tokens - 1)
            order = torch.arange(part.num_tokens, device=starts.device)
            reqs = torch.searchsorted(ends.flatten(), order, right=True)
            reqs = reqs.clamp(max=part.num_reqs - 1)
            offsets = (order - starts[reqs, 0]).clamp(max=part.max_query_len - 1)
            self._places = reqs * part.max_query_len + offsets

    def to_lines(self, values: Tensor) -> Tensor:
        """Return ``[D, L, C]`` for ``values`` [tokens, C]; padding is anything."""
        return values.view(*self._shape, -1) if self._is_uniform else values[self._tokens]

    def to_tokens(self, lines: Tensor) -> Tensor:
        """Return ``[tokens, ...]`` for ``lines`` [D, L, ...]."""
        flat = lines.flatten(0, 1)
        return flat if self._is_uniform else flat[self._places]


class PrefillPlaces:
    """The tokens of requests that prefill: in one line for the convolution, in chunks for the scan.

    Attributes:
        source: Gives the states that requests start from.
        state_ids: ``[P]``, where each request's last state is kept.
        num_tokens: How many tokens there are (T).
        first_token: The first one's place in the batch.
        chunks: ``[chunks, S]``, the tokens of each chunk, counted from ``first_token``.
        is_token: ``[chunks, S]`` bool; the rest is padding.
        req_of_chunk: ``[chunks]``.
        is_first: ``[chunks]`` bool, whether it is its request's first.
        last_chunks: ``[P]``, each request's last.
    """

    def __init__(
        self,
        part: MambaPrefillMetadata,
        common: CommonAttentionMetadata,
        req_of_token: Tensor,
        num_before: int,
    ) -> None:
        """Compute the places, with ``num_before`` inputs before each request's own."""
        reqs = slice(part.first_req, part.first_req + part.num_reqs)
        self.source = _Sources(part.states, common, reqs)
        self.state_ids = part.states.state_ids[:, 0]
        self.num_tokens, self.first_token = part.num_tokens, part.first_token
        device = req_of_token.device
        offsets = torch.arange(num_before, device=device)
        shifts = torch.arange(part.num_reqs, device=device) * num_before
        self._before = (part.query_start_loc[:-1] + shifts)[:, None] + offsets
        self._last = (part.query_start_loc[1:] + shifts)[:, None] + offsets
        order = torch.arange(part.num_tokens, device=device)
        own_reqs = req_of_token[part.first_token :] - part.first_req
        self._outputs = order + own_reqs * num_before
        self._inputs = self._outputs + num_before
        cut = part.chunks
        starts, ends = cut.cu_chunk_seqlens[:-1, None], cut.cu_chunk_seqlens[1:, None]
        tokens = starts + torch.arange(min(CHUNK_SIZE, part.num_tokens), device=device)
        self.is_token = tokens < ends
        self.chunks = tokens.clamp(max=part.num_tokens - 1)
        self.req_of_chunk = cut.seq_idx.to(torch.int64)
        self.is_first = torch.cat((self.req_of_chunk.new_ones(1), self.req_of_chunk.diff())) != 0
        self.last_chunks = cut.last_chunk_indices

    def to_line(self, values: Tensor, before: Tensor) -> Tensor:
        """Return ``[T + P K, C]``: before each request's tokens the K inputs it came with."""
        line = values.new_empty(len(values) + self._before.numel(), values.shape[1])
        line[self._inputs] = values
        line[self._before] = before
        return line

    def of_tokens(self, outputs: Tensor) -> Tensor:
        """Return ``[T, C]`` of what a convolution over the whole line gives."""
        return outputs[self._outputs]

    def last_inputs(self, line: Tensor) -> Tensor:
        """Return ``[P, K, C]``, what each request's next tokens look back on."""
        return line[self._last]


M = TypeVar("M")
StatePlaces = tuple[DecodePlaces | None, PrefillPlaces | None]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A cache group's part of a step.

    Attributes:
        common: What its builders were given.
        built: What they built.
    """

    common: CommonAttentionMetadata
    built: Sequence[object]

    def of(self, kind: type[M]) -> M:
        """Return what the builder of that kind of metadata built.

        Raises:
            RunnerError: None of the group's builders builds it.
        """
        for metadata in self.built:
            if isinstance(metadata, kind):
                return metadata
        raise RunnerError(f"no builder of this group builds {kind.__name__}")


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A step's tokens (T), and where their requests' state lies.

    Attributes:
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64.
        req_of_token: ``[T]`` int64, each token's row in the batch.
        groups: By name.
        dtype: Of the model.
        rotations: The rotations computed so far.
        places: Where the tokens of recurrent layers stand, by the inputs they look back on.
    """

    token_ids: Tensor
    positions: Tensor
    req_of_token: Tensor
    groups: Mapping[str, GroupStep]
    dtype: torch.dtype
    rotations: dict[Rope, Rotation] = field(default_factory=dict)
    places: dict[int, StatePlaces] = field(default_factory=dict)

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number that is at least float32."""
        return max(self.dtype.itemsize, 4)

    def rotation(self, rope: Rope) -> Rotation:
        """Return the rotations of this step's tokens, computed once for all layers."""
        if rope not in self.rotations:
            self.rotations[rope] = Rotation(rope, self.positions, self.dtype)
        return self.rotations[rope]

    def state_places(self, num_before: int) -> StatePlaces:
        """Return where tokens stand that look back on ``num_before`` inputs, once for all layers.

        The first part is None where nothing decodes, the second where nothing prefills.
        """
        if num_before not in self.places:
            group = self.groups[MAMBA]
            decode, prefill = group.of(MambaMetadata).decode, group.of(MambaMetadata).prefill
            self.places[num_before] = (
                DecodePlaces(decode, group.common) if decode.num_tokens else None,
                PrefillPlaces(prefill, group.common, self.req_of_token, num_before)
                if prefill.num_tokens
                else None,
            )
        return self.places[num_before]
