"""Requests: what a user holds of one, and the arrays in which the loop keeps those that run.

Running requests are a structure of arrays. A request has one index, its row, which is also
its row in the block tables. A waiting or finished request has no row and keeps its tokens
itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from bt_runner.arguments import require_int, require_kind
from bt_runner.arrays import Ints, Tokens, ragged
from bt_runner.errors import BadInputError
from bt_runner.prefix_cache import PrefixHashes

_CHUNK = 256
_CHUNK_BITS = 8
_NO_TOKEN = -1
_SEEDS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_new_tokens: Tokens after which it ends.
        temperature: 0 is greedy; above, tokens are drawn.
        seed: Of the draws; equal seeds give equal tokens, whatever else is in the batch.
        stop_tokens: Tokens that end it; the token itself is kept.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check each field; how many new tokens a request may want, the engine says."""
        require_int("max_new_tokens", self.max_new_tokens)
        require_int("seed", self.seed)
        require_kind("stop_tokens", self.stop_tokens, frozenset)
        is_number = isinstance(self.temperature, int | float)
        if not (is_number and math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadInputError(
                f"temperature must be a number of at least 0, not {self.temperature!r}",
                argument="temperature",
                value=self.temperature,
            )


class FinishReason(Enum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"


class Request:
    """A request, from its arrival to its end; it belongs to its engine's thread.

    Attributes:
        request_id: Its name.
        prompt_len: Tokens it came with.
        params: How it is sampled.
        row: Its row while it runs, else None.
        finish_reason: Why it ended, None while it has not.
        num_preemptions: How often its blocks were taken away.
        prefix_hashes: The hashes of its prefixes, once they were asked for.
    """

    __slots__ = (
        "_running",
        "_tokens",
        "finish_reason",
        "num_preemptions",
        "params",
        "prefix_hashes",
        "prompt_len",
        "request_id",
        "row",
    )

    def __init__(self, request_id: str, tokens: Tokens, params: SamplingParams) -> None:
        """Start with the prompt's tokens, waiting."""
        self.request_id = request_id
        self.prompt_len = len(tokens)
        self.params = params
        self.row: int | None = None
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        self.prefix_hashes: PrefixHashes | None = None
        self._tokens = tokens
        self._running: RunningRequests | None = None

    @property
    def max_len(self) -> int:
        """Tokens it has at its longest."""
        return self.prompt_len + self.params.max_new_tokens

    @property
    def token_array(self) -> Tokens:
        """The prompt and all tokens chosen since, as an array."""
        if self.row is None or self._running is None:
            return self._tokens
        return self._running.tokens_of(self.row)

    @property
    def num_tokens(self) -> int:
        """The prompt's tokens and all chosen since, counted."""
        if self.row is None or self._running is None:
            return len(self._tokens)
        return int(self._running.num_tokens[self.row])

    @property
    def tokens(self) -> list[int]:
        """The prompt and all tokens chosen since."""
        tokens: list[int] = self.token_array.tolist()
        return tokens

    @property
    def output(self) -> list[int]:
        """The tokens chosen so far."""
        tokens: list[int] = self.token_array[self.prompt_len :].tolist()
        return tokens

    @property
    def num_computed(self) -> int:
        """Leading tokens whose cached state is valid when the steps in flight have ended."""
        if self.row is None or self._running is None:
            return 0
        return int(self._running.num_computed[self.row])

    def append(self, tokens: Tokens) -> int:
        """Give a waiting request chosen tokens, up to the one that ends it; return how many."""
        kept = tokens[: self.max_len - len(self._tokens)]
        stops = np.isin(kept, list(self.params.stop_tokens)).nonzero()[0]
        if len(stops):
            kept = kept[: int(stops[0]) + 1]
        self._tokens = np.concatenate((self._tokens, kept))
        return len(kept)

    def reason_to_end(self) -> FinishReason | None:
        """Return why its tokens end it, or None."""
        tokens = self.token_array
        if len(tokens) == self.prompt_len:
            return None
        if int(tokens[-1]) in self.params.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.max_len else None

    def leave_row(self) -> None:
        """Keep its tokens itself from now on; it is in the row or out of it, never between."""
        self._tokens = self.token_array
        self.row = None

    def enter_row(self, running: RunningRequests, row: int) -> None:
        """Let ``running``, which has a copy of the tokens, keep them in ``row`` from now on."""
        self._running = running
        self.row = row


class RunningRequests:
    """The requests that have a row, as arrays with one entry a row (R).

    Tokens lie in chunks that rows take as they grow, so that memory follows the tokens
    there are and not the longest request that could come.

    Attributes:
        requests: [R] object; the request in each row, or None.
        lives: [R]; how often the row was given up. A step in flight that knew a smaller
            number belongs to a request that has left.
        num_tokens: [R]; tokens that the host knows. One assignment to it makes a step's
            tokens the requests' own; an error before or after loses nothing.
        num_in_flight: [R]; tokens that steps in flight choose and the host does not know.
        num_computed: [R]; tokens whose cached state is valid when the steps in flight end.
        num_drafts: [R]; guesses after the known tokens, for the next step to verify.
        num_accepted: [R]; tokens of the row's last step that stayed; 0 where the device
            knows how many.
        max_len: [R]; tokens at which the request ends.
        temperatures: [R] float64; 0 is greedy.
        seeds: [R]; of the draws.
    """

    def __init__(self, max_num_reqs: int) -> None:
        """Start with every row empty."""
        self._max_num_reqs = max_num_reqs
        self.requests: NDArray[np.object_] = np.full(max_num_reqs, None, dtype=object)
        self.lives = self._zeros()
        self.num_tokens = self._zeros()
        self.num_in_flight = self._zeros()
        self.num_computed = self._zeros()
        self.num_drafts = self._zeros()
        self.num_accepted = self._zeros()
        self.max_len = self._zeros()
        self.temperatures = np.zeros(max_num_reqs, np.float64)
        self.seeds = self._zeros()
        self._stop_tokens: Tokens = np.full((max_num_reqs, 0), _NO_TOKEN, np.int32)
        # a row's chunks in order, those of all rows one after the other, and the free ones
        self._chunk_of: Tokens
        self._num_chunks: Ints
        self._chunks: Tokens
        self._free_chunks: Tokens
        self._num_free: int
        self._start_chunks()

    def enter(self, row: int, request: Request, num_computed: int) -> None:
        """Put a request into an empty row; its last step kept one token."""
        tokens = request.token_array
        self.num_tokens[row] = self.num_in_flight[row] = self.num_drafts[row] = 0
        self._reserve(np.array([row]), np.array([len(tokens)]))
        chunks = self._chunk_of[row, : self._num_chunks[row]]
        padded = np.zeros(len(chunks) * _CHUNK, np.int32)
        padded[: len(tokens)] = tokens
        self._chunks[chunks] = padded.reshape(-1, _CHUNK)
        params = request.params
        self.num_computed[row] = num_computed
        self.num_accepted[row] = 1
        self.max_len[row] = request.max_len
        self.temperatures[row] = params.temperature
        self.seeds[row] = np.uint64(params.seed % _SEEDS).astype(np.int64)
        self._set_stop_tokens(row, sorted(params.stop_tokens))
        self.requests[row] = request
        self.num_tokens[row] = len(tokens)
        request.enter_row(self, row)

    def leave(self, row: int) -> Request:
        """Take a request out of its row, with its tokens."""
        request: Request = self.requests[row]
        request.leave_row()
        self.lives[row] += 1
        self.requests[row] = None
        used = self._chunk_of[row, : self._num_chunks[row]]
        self._free_chunks[self._num_free : self._num_free + len(used)] = used
        self._num_free += len(used)
        self._num_chunks[row] = 0
        return request

    def reset(self) -> None:
        """Forget every row; its request has left it."""
        self.lives += 1
        self.requests[:] = None
        self._start_chunks()

    def tokens_of(self, row: int) -> Tokens:
        """Return a row's known tokens."""
        chunks = self._chunk_of[row, : self._num_chunks[row]]
        tokens: Tokens = self._chunks[chunks].reshape(-1)[: self.num_tokens[row]]
        return tokens

    def span(self, row: int, start: int, end: int) -> memoryview:
        """Return a row's known tokens from position ``start`` up to ``end``, to be read at once."""
        first, last = start >> _CHUNK_BITS, (end - 1) >> _CHUNK_BITS
        offset = start & (_CHUNK - 1)
        if first == last:
            offset += self._chunk_of.item(row, first) << _CHUNK_BITS
            return self._token_view[offset : offset + end - start]
        tokens = self._chunks[self._chunk_of[row, first : last + 1]].reshape(-1)
        return tokens[offset : offset + end - start].data

    def read(self, rows: Ints, positions: Ints) -> Tokens:
        """Return the token at each position of a row; known tokens, then drafts."""
        tokens: Tokens = self._chunks.reshape(-1)[self._slots(rows, positions)]
        return tokens

    def append(self, rows: Ints, tokens: Tokens, counts: Ints) -> None:
        """Make the first ``counts`` of ``tokens`` [N, K] the rows' own."""
        num_tokens = self._write(rows, tokens, counts)
        self.num_drafts[rows] = 0
        self.num_in_flight[rows] -= 1
        self.num_tokens[rows] = num_tokens

    def set_drafts(self, rows: Ints, drafts: Tokens, counts: Ints) -> None:
        """Let the first ``counts`` of ``drafts`` [N, K] wait behind the rows' known tokens."""
        self._write(rows, drafts, counts)
        self.num_drafts[rows] = counts

    def first_stop(self, rows: Ints, tokens: Tokens) -> Ints:
        """Return where the first stop token stands among each row's ``tokens`` [N, K]; else K."""
        num_columns = tokens.shape[1]
        if not self._stop_tokens.shape[1]:
            return np.full(len(rows), num_columns)
        stops = (tokens[:, :, None] == self._stop_tokens[rows][:, None, :]).any(axis=2)
        places: Ints = np.where(stops.any(axis=1), stops.argmax(axis=1), num_columns)
        return places

    def _write(self, rows: Ints, tokens: Tokens, counts: Ints) -> Ints:
        """Write tokens behind the known ones, where nothing sees them yet; return the new ends."""
        starts = self.num_tokens[rows]
        ends = starts + counts
        self._reserve(rows, ends)
        if tokens.shape[1] == 1 and counts.all():
            places, values = starts, tokens[:, 0]
        else:
            rows, places = np.repeat(rows, counts), ragged(starts, counts)
            values = tokens[np.arange(tokens.shape[1]) < counts[:, None]]
        self._chunks.reshape(-1)[self._slots(rows, places)] = values
        return ends

    def _slots(self, rows: Ints, positions: Ints) -> Ints:
        """Return where positions of rows lie among the tokens of all chunks."""
        columns = rows * self._chunk_of.shape[1] + (positions >> _CHUNK_BITS)
        chunks = self._chunk_of.reshape(-1)[columns].astype(np.int64)
        slots: Ints = (chunks << _CHUNK_BITS) + (positions & (_CHUNK - 1))
        return slots

    def _reserve(self, rows: Ints, ends: Ints) -> None:
        """Give rows the chunks that tokens before ``ends`` need."""
        needed = (ends + (_CHUNK - 1)) >> _CHUNK_BITS
        places = (needed > self._num_chunks[rows]).nonzero()[0]
        if not len(places):
            return
        rows, needed = rows[places], needed[places]
        missing = needed - self._num_chunks[rows]
        total, widest = int(missing.sum()), int(needed.max())
        if widest > self._chunk_of.shape[1]:
            width = max(widest, 2 * self._chunk_of.shape[1])
            wider = np.zeros((self._max_num_reqs, width), np.int32)
            wider[:, : self._chunk_of.shape[1]] = self._chunk_of
            self._chunk_of = wider
        if total > self._num_free:
            self._add_chunks(total)
        owners = np.repeat(rows, missing)
        columns = ragged(self._num_chunks[rows], missing)
        self._num_free -= total
        self._chunk_of[owners, columns] = self._free_chunks[self._num_free : self._num_free + total]
        self._num_chunks[rows] = needed

    def _start_chunks(self) -> None:
        self._set_chunks(np.zeros((0, _CHUNK), np.int32))
        self._chunk_of = np.zeros((self._max_num_reqs, 1), np.int32)
        self._num_chunks = self._zeros()
        self._free_chunks = np.zeros(0, np.int32)
        self._num_free = 0

    def _add_chunks(self, at_least: int) -> None:
        old = len(self._chunks)
        new = old + max(old, at_least, 16)
        chunks = np.zeros((new, _CHUNK), np.int32)
        chunks[:old] = self._chunks
        free = np.zeros(new, np.int32)
        free[: self._num_free] = self._free_chunks[: self._num_free]
        free[self._num_free : self._num_free + new - old] = np.arange(old, new)
        self._set_chunks(chunks)
        self._free_chunks = free
        self._num_free += new - old

    def _set_chunks(self, chunks: Tokens) -> None:
        self._chunks = chunks
        self._token_view = chunks.reshape(-1).data

    def _set_stop_tokens(self, row: int, stop_tokens: list[int]) -> None:
        known = [token for token in stop_tokens if 0 <= token < 2**31]
        if len(known) > self._stop_tokens.shape[1]:
            wider = np.full((self._max_num_reqs, len(known)), _NO_TOKEN, np.int32)
            wider[:, : self._stop_tokens.shape[1]] = self._stop_tokens
            self._stop_tokens = wider
        self._stop_tokens[row] = _NO_TOKEN
        self._stop_tokens[row, : len(known)] = known

    def _zeros(self) -> Ints:
        return np.zeros(self._max_num_reqs, np.int64)
