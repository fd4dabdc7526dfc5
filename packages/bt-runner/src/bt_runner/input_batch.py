"""Lays a step's batch out in one packed buffer, which reaches the device in one copy.

N rows and T tokens, padding included; S choices. The numbers of a batch lie in 64-bit words,
part after part. Where a part that a captured graph reads begins depends on N and T alone, so
that the graph finds it where it was at its capture; what says how tokens are chosen comes last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bt_builders import AttentionBatch
from bt_runner.arrays import Flags, Ints, ragged
from bt_runner.requests import RunningRequests
from bt_runner.sampler import Sampling
from bt_runner.scheduler import SchedulerOutput
from bt_tables import StepBatch
from bt_width import ServingLimits

_ALIGNED_WORDS = 8
_FROM_DEVICE = -1
_MAX_PLACES = 64


class _Place(NamedTuple):
    """A part of the buffer.

    Attributes:
        start: Its first word.
        length: Its numbers.
        is_narrow: Whether they have 32 bits, else 64.
    """

    start: int
    length: int
    is_narrow: bool

    def of_host(self, words: NDArray[np.int64]) -> NDArray[np.int64] | NDArray[np.int32]:
        """Return the part of a host buffer."""
        if not self.is_narrow:
            return words[self.start : self.start + self.length]
        narrow = words[self.start : self.start + (self.length + 1) // 2].view(np.int32)
        return narrow[: self.length]

    def of_device(self, words: Tensor) -> Tensor:
        """Return the part of a device buffer."""
        if not self.is_narrow:
            return words[self.start : self.start + self.length]
        narrow = words[self.start : self.start + (self.length + 1) // 2].view(torch.int32)
        return narrow[: self.length]


class _Host(NamedTuple):
    """The parts of a host buffer."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    req_of_token: NDArray[np.int64]
    rows: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    num_computed_tokens: NDArray[np.int32]
    num_accepted_tokens: NDArray[np.int32]
    choice_indices: NDArray[np.int64]
    choice_rows: NDArray[np.int64]
    choice_positions: NDArray[np.int64]
    seeds: NDArray[np.int64]
    temperatures: NDArray[np.int64]
    query_start_loc_host: Tensor
    seq_lens_host: Tensor


class _Device(NamedTuple):
    """The same parts of the device buffer.

    Attributes:
        inputs: Those of an ``InputBatch``, by name.
        greedy: How tokens are chosen where no part says more.
        drawn: How they are chosen with seeds and temperatures.
    """

    inputs: dict[str, Any]
    greedy: Sampling
    drawn: Sampling


class _Slot:
    """One host buffer, and the event after which the device has read it."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.pinned = torch.zeros(num_words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.words: NDArray[np.int64] = self.pinned.numpy()
        self.parts: dict[tuple[int, int, int], _Host] = {}
        self.event = _event() if device.type == "cuda" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step's batch on the host and on the device; N rows and T tokens, padding included.

    Attributes:
        num_reqs: Rows (N).
        num_tokens: Tokens (T).
        max_query_len: The most tokens of one request.
        max_seq_len: The longest request, in tokens.
        rows_host: ``[N]`` int32; each request's row, -1 for padding.
        query_start_loc_host: ``[N + 1]`` int32.
        seq_lens_host: ``[N]`` int32; 0 for padding.
        is_prefilling: ``[N]`` bool, host.
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64; -1 for padding.
        req_of_token: ``[T]`` int64, the batch's row of each token; the last one for padding.
        rows: ``[N]`` int64; for padding a row that no request has.
        query_start_loc: ``[N + 1]`` int32.
        seq_lens: ``[N]`` int32.
        num_computed_tokens: ``[N]`` int32.
        num_accepted_tokens: ``[N]`` int32.
        sampling: How its tokens are chosen.
        takes_from_device: Whether a token is the last one its request chose, which the host
            does not know yet.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    rows_host: NDArray[np.int32]
    query_start_loc_host: Tensor
    seq_lens_host: Tensor
    is_prefilling: Tensor
    token_ids: Tensor
    positions: Tensor
    req_of_token: Tensor
    rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    num_accepted_tokens: Tensor
    sampling: Sampling
    takes_from_device: bool

    def for_tables(self) -> StepBatch:
        """Return what the table update is given."""
        return StepBatch(
            idx_mapping=self.rows_host,
            query_start_loc=self.query_start_loc_host,
            positions=self.positions,
            num_reqs_padded=self.num_reqs,
            num_tokens_padded=self.num_tokens,
        )

    def for_builders(self, max_seq_len: int | None = None) -> AttentionBatch:
        """Return what the builders of all groups are given.

        Args:
            max_seq_len: An upper bound to plan with instead of the batch's longest request.
        """
        return AttentionBatch(
            num_reqs=self.num_reqs,
            num_tokens=self.num_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=max_seq_len or self.max_seq_len,
            query_start_loc=self.query_start_loc,
            query_start_loc_host=self.query_start_loc_host,
            seq_lens=self.seq_lens,
            seq_lens_upper_bound_host=self.seq_lens_host,
            num_computed_tokens=self.num_computed_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            is_prefilling=self.is_prefilling,
            positions=self.positions,
        )


class InputBuffers:
    """Packed buffers of input batches: one on the device, a host buffer per step in flight.

    Attributes:
        num_copies: Copies to the device so far: one a step.
    """

    def __init__(
        self, limits: ServingLimits, device: torch.device, max_steps_in_flight: int
    ) -> None:
        """Allocate for the largest step."""
        self.num_copies = 0
        self._padding_row = limits.max_num_reqs
        self._device = device
        self._verifies_drafts = limits.num_speculative_tokens > 0
        num_tokens, num_reqs = limits.max_num_batched_tokens, limits.max_num_reqs
        _, num_words = _places(num_reqs, num_tokens, num_tokens)
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._parts: dict[tuple[int, int, int], _Device] = {}
        self._slots = [_Slot(num_words, device) for _ in range(max_steps_in_flight)]
        self._turn = 0

    def pack(
        self,
        batch: SchedulerOutput,
        table: RunningRequests,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
    ) -> InputBatch:
        """Lay a batch out, padded where a captured graph wants more rows or tokens, and send it."""
        query_lens, seq_lens = batch.num_tokens, batch.seq_lens
        count = len(query_lens)
        ends = query_lens.cumsum()
        num_real = int(ends[-1])
        num_reqs, num_tokens = num_reqs_padded or count, num_tokens_padded or num_real
        slot = self._next_slot()
        size = num_reqs, num_tokens, int(batch.num_choices.sum())
        host = self._host_parts(slot, *size)
        host.rows[:count], host.rows[count:] = batch.rows, self._padding_row
        host.query_start_loc[0] = 0
        host.query_start_loc[1 : count + 1], host.query_start_loc[count + 1 :] = ends, num_real
        host.seq_lens[:count], host.seq_lens[count:] = seq_lens, 0
        host.num_computed_tokens[:count], host.num_computed_tokens[count:] = batch.starts, 0
        host.num_accepted_tokens[:] = 1
        if self._verifies_drafts and batch.rows[0] >= 0:
            host.num_accepted_tokens[:count] = table.num_accepted[batch.rows]
        takes_from_device = self._lay_out_tokens(batch, table, host, num_real)
        is_greedy = self._lay_out_choices(batch, table, host, ends)
        places, end = _places(*size)
        self._send(slot, places["seeds"].start if is_greedy else end)
        device = self._device_parts(*size)
        rows_host = np.full(num_reqs, -1, np.int32)
        rows_host[:count] = batch.rows
        is_prefilling = np.zeros(num_reqs, bool)
        is_prefilling[:count] = batch.is_prefilling
        return InputBatch(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            rows_host=rows_host,
            query_start_loc_host=host.query_start_loc_host,
            seq_lens_host=host.seq_lens_host,
            is_prefilling=torch.from_numpy(is_prefilling),
            **device.inputs,
            sampling=device.greedy if is_greedy else device.drawn,
            takes_from_device=takes_from_device,
        )

    def _lay_out_tokens(
        self, batch: SchedulerOutput, table: RunningRequests, host: _Host, num_real: int
    ) -> bool:
        """Write ids, positions and rows of tokens; say whether the device has to add some ids."""
        query_lens = batch.num_tokens
        host.token_ids[num_real:], host.positions[num_real:] = 0, -1
        host.req_of_token[num_real:] = len(host.rows) - 1
        if num_real == len(query_lens):
            rows, positions, num_on_host = batch.rows, batch.starts, batch.num_on_host
            host.req_of_token[:num_real] = np.arange(num_real)
        else:
            reqs = np.repeat(np.arange(len(query_lens)), query_lens)
            rows, num_on_host = batch.rows[reqs], batch.num_on_host[reqs]
            positions = ragged(batch.starts, query_lens)
            host.req_of_token[:num_real] = reqs
        host.positions[:num_real] = positions
        if batch.rows[0] < 0:
            host.token_ids[:num_real] = 0
            return False
        is_known = positions < num_on_host
        num_known = np.count_nonzero(is_known)
        if num_known == num_real:
            host.token_ids[:num_real] = table.read(rows, positions)
            return False
        # a token on its way to the host has no place there yet
        host.token_ids[:num_real] = _FROM_DEVICE
        if num_known:
            host.token_ids[:num_real][is_known] = table.read(rows[is_known], positions[is_known])
        return True

    def _lay_out_choices(
        self, batch: SchedulerOutput, table: RunningRequests, host: _Host, ends: Ints
    ) -> bool:
        """Write how tokens are chosen; say whether the best one is, for all."""
        counts = batch.num_choices
        if (counts == 1).all():
            indices, rows, positions = ends - 1, batch.rows, batch.seq_lens
        else:
            indices = ragged(ends - counts, counts)
            rows = np.repeat(batch.rows, counts)
            positions = ragged(batch.seq_lens - counts + 1, counts)
        host.choice_indices[:], host.choice_rows[:] = indices, rows
        host.choice_positions[:] = positions
        temperatures = table.temperatures[rows]
        if not temperatures.any():
            return True
        host.seeds[:], host.temperatures[:] = table.seeds[rows], temperatures.view(np.int64)
        return False

    def _next_slot(self) -> _Slot:
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        if slot.event is not None:
            slot.event.synchronize()
        return slot

    def _send(self, slot: _Slot, end: int) -> None:
        self._words[:end].copy_(slot.pinned[:end], non_blocking=True)
        self.num_copies += 1
        if slot.event is not None:
            slot.event.record()

    def _host_parts(self, slot: _Slot, num_reqs: int, num_tokens: int, num_choices: int) -> _Host:
        key = (num_reqs, num_tokens, num_choices)
        if key not in slot.parts:
            if len(slot.parts) == _MAX_PLACES:
                slot.parts.clear()
            places, _ = _places(*key)
            parts = [place.of_host(slot.words) for place in places.values()]
            starts, lens = (torch.from_numpy(parts[index]) for index in (4, 5))
            slot.parts[key] = _Host._make([*parts, starts, lens])
        return slot.parts[key]

    def _device_parts(self, num_reqs: int, num_tokens: int, num_choices: int) -> _Device:
        key = (num_reqs, num_tokens, num_choices)
        if key not in self._parts:
            if len(self._parts) == _MAX_PLACES:
                self._parts.clear()
            places, _ = _places(*key)
            inputs = {name: place.of_device(self._words) for name, place in places.items()}
            temperatures, nothing = inputs.pop("temperatures"), self._words[:0]
            greedy = Sampling(
                indices=inputs.pop("choice_indices"),
                rows=inputs.pop("choice_rows"),
                positions=inputs.pop("choice_positions"),
                seeds=nothing,
                temperatures=nothing,
                is_greedy=True,
            )
            drawn = replace(
                greedy,
                seeds=inputs.pop("seeds"),
                temperatures=temperatures.view(torch.float64),
                is_greedy=False,
            )
            self._parts[key] = _Device(inputs, greedy, drawn)
        return self._parts[key]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped


@lru_cache(maxsize=_MAX_PLACES)
def _places(num_reqs: int, num_tokens: int, num_choices: int) -> tuple[dict[str, _Place], int]:
    """Return where each part of a batch lies, and where the last one ends."""
    lengths = {
        "token_ids": (num_tokens, False),
        "positions": (num_tokens, False),
        "req_of_token": (num_tokens, False),
        "rows": (num_reqs, False),
        "query_start_loc": (num_reqs + 1, True),
        "seq_lens": (num_reqs, True),
        "num_computed_tokens": (num_reqs, True),
        "num_accepted_tokens": (num_reqs, True),
        "choice_indices": (num_choices, False),
        "choice_rows": (num_choices, False),
        "choice_positions": (num_choices, False),
        "seeds": (num_choices, False),
        "temperatures": (num_choices, False),
    }
    places, start = {}, 0
    for name, (length, is_narrow) in lengths.items():
        places[name] = _Place(start, length, is_narrow)
        num_words = (length + 1) // 2 if is_narrow else length
        start += -(-num_words // _ALIGNED_WORDS) * _ALIGNED_WORDS
    return places, start


def dummy_batch(num_reqs: int, query_len: int) -> SchedulerOutput:
    """Return a batch that decodes without rows: it reads and writes null blocks alone."""
    ones = np.ones(num_reqs, np.int64)
    no_flags: Flags = np.zeros(num_reqs, bool)
    return SchedulerOutput(
        rows=-ones,
        lives=0 * ones,
        requests=np.full(num_reqs, None, dtype=object),
        starts=ones,
        num_known=ones,
        num_drafts=(query_len - 1) * ones,
        num_choices=0 * ones,
        is_prefilling=no_flags,
        num_on_host=(1 + query_len) * ones,
    )
