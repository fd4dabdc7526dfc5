"""A Mamba2 mixer whose states live in blocks: read and written where the metadata says."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.memory import WORKSPACE_BYTES, pieces
from bt_runner.models.cache.paging import write
from bt_runner.models.config import MambaLayer
from bt_runner.models.layers.numerics import rms_norm, widened
from bt_runner.models.layers.recurrence import Inputs, convolve, recur, scan
from bt_runner.models.layers.state_places import DecodePlaces, PrefillPlaces
from bt_runner.models.step import ModelStep
from bt_runner.models.weights import Scope


class StateCaches(NamedTuple):
    """A layer's caches.

    Attributes:
        conv: ``[blocks, K - 1, C]``, the convolution's last inputs.
        states: ``[blocks, heads, P, N]``.
    """

    conv: Tensor
    states: Tensor


class Mamba2Mixer:
    """The mixer of one layer."""

    def __init__(
        self,
        config: MambaLayer,
        scope: Scope,
        caches: StateCaches,
        eps: float,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """Take the mixer's weights and the layer's caches."""
        self._workspace_bytes = workspace_bytes
        self._config = config
        self._scope = scope
        by_group = (config.num_groups, -1)
        sizes = caches.states.shape
        states = caches.states.view(sizes[0], *by_group, *sizes[2:])
        self._caches = StateCaches(caches.conv, states)
        self._eps = eps
        self._decay = -torch.exp(widened(scope["A_log"])).view(by_group)
        self._skip = widened(scope["D"]).view(*by_group, 1)
        self._step_bias = widened(scope["dt_bias"])
        self._taps = widened(scope["conv1d.weight"][:, 0].T.contiguous())
        self._norm = scope["norm.weight"].view(config.num_groups, -1)

    def __call__(self, hidden: Tensor, step: ModelStep) -> Tensor:
        """Return the mixer's output for ``hidden`` [T, hidden], and move the states on."""
        config = self._config
        gate, mixed, steps = self._scope.project(hidden, "in_proj").split_with_sizes(
            [config.inner_size, config.conv_channels, config.num_heads], dim=-1
        )
        decode, prefill = step.state_places(config.conv_kernel - 1)
        reads = []
        num_decode = len(hidden) - (prefill.num_tokens if prefill else 0)
        if decode is not None:
            reads.append(self._decode(mixed[:num_decode], steps[:num_decode], decode))
        if prefill is not None:
            reads.append(self._prefill(mixed[num_decode:], steps[num_decode:], prefill))
        return self._output(torch.cat(reads) if len(reads) > 1 else reads[0], gate)

    def _decode(self, mixed: Tensor, steps: Tensor, places: DecodePlaces) -> Tensor:
        """Run the requests that decode token by token; return ``[tokens, G, H, P]``."""
        conv, states = self._caches
        before = places.source(conv)
        line = torch.cat((before, places.to_lines(mixed)), dim=1)
        # what each token leaves for the next one to look back on
        windows = line[:, 1:].unfold(1, before.shape[1], 1).mT
        write(conv, places.state_ids, windows.flatten(0, 1))
        inputs = self._inputs(self._convolve(line), places.to_lines(steps))
        outputs = recur(inputs, places.source(states))
        write(states, places.state_ids, outputs.states.flatten(0, 1))
        return places.to_tokens(outputs.read.addcmul_(inputs.values, self._skip))

    def _prefill(self, mixed: Tensor, steps: Tensor, places: PrefillPlaces) -> Tensor:
        """Run the requests that prefill chunk by chunk; return ``[tokens, G, H, P]``."""
        conv, states = self._caches
        line = places.to_line(mixed, places.source(conv))
        write(conv, places.state_ids, places.last_inputs(line))
        convolved = places.of_tokens(self._convolve(line[None])[0])
        inputs = self._inputs(convolved[None], steps[None])
        starting = places.source(states)
        last_states = torch.empty_like(starting)
        state = torch.zeros_like(starting[0])
        read = inputs.values.new_empty(len(mixed) + 1, *inputs.values.shape[2:])
        rows = places.chunks.where(places.is_token, len(mixed))
        bytes_per_line = self._bytes_of_line(places.chunks.shape[1])
        for span in pieces(len(places.chunks), bytes_per_line, self._workspace_bytes):
            lines = _take(inputs, places.chunks[span], places.is_token[span])
            reqs, is_first = places.req_of_chunk[span], places.is_first[span]
            outputs = scan(lines, starting[reqs], is_first, state)
            state = outputs.states[-1]
            read[rows[span]] = outputs.read
            last = places.last_chunks - span.start
            is_here = ((last >= 0) & (last < len(outputs.states))).view(-1, 1, 1, 1, 1)
            found = outputs.states[last.clamp(0, len(outputs.states) - 1)]
            last_states = torch.where(is_here, found, last_states)
        write(states, places.state_ids, last_states)
        return read[:-1].addcmul_(inputs.values[0], self._skip)

    def _convolve(self, lines: Tensor) -> Tensor:
        return convolve(lines, self._taps, self._scope.get("conv1d.bias"))

    def _inputs(self, convolved: Tensor, steps: Tensor) -> Inputs:
        """Return the recurrence's inputs for lines ``[B, L, C]`` and ``[B, L, H]``."""
        config = self._config
        size = config.num_groups * config.state_size
        values, keys, queries = widened(convolved).split_with_sizes(
            [config.inner_size, size, size], dim=-1
        )
        by_group = (*convolved.shape[:2], config.num_groups, -1)
        return Inputs(
            values=values.view(*by_group, config.head_dim),
            steps=F.softplus(widened(steps) + self._step_bias).view(by_group),
            keys=keys.view(by_group),
            queries=queries.view(by_group),
            decay=self._decay,
        )

    def _bytes_of_line(self, num_tokens: int) -> int:
        """Return the bytes that the scan of a line of so many tokens takes."""
        config = self._config
        per_head = config.head_dim * config.state_size
        per_pair = 4 * num_tokens * num_tokens
        per_token = num_tokens * (3 * config.head_dim + 3 * config.state_size)
        numbers = config.num_heads * (5 * per_head + per_pair + per_token)
        return numbers * self._decay.element_size()

    def _output(self, read: Tensor, gate: Tensor) -> Tensor:
        gated = (read.flatten(1) * F.silu(widened(gate))).view(len(read), len(self._norm), -1)
        normed = rms_norm(gated, self._norm, self._eps)
        return self._scope.project(normed.flatten(1), "out_proj")


def _take(inputs: Inputs, tokens: Tensor, is_token: Tensor) -> Inputs:
    """Return one line per row of ``tokens`` [B, L] from a single line; the rest is padding."""
    return Inputs(
        values=inputs.values[0, tokens],
        steps=inputs.steps[0, tokens].masked_fill(~is_token[..., None, None], 0),
        keys=inputs.keys[0, tokens],
        queries=inputs.queries[0, tokens],
        decay=inputs.decay,
    )
