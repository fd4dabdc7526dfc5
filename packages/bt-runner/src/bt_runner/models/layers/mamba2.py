"""Mamba2: its recurrence, and a mixer whose states lie in blocks.

The recurrence knows no cache. B lines of L tokens; G groups of H heads of P channels with N
numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_runner.models.caches import write
from bt_runner.models.config import MambaLayer
from bt_runner.models.layers.numerics import WORKSPACE_BYTES, Scope, pieces, rms_norm, widened
from bt_runner.models.step import DecodePlaces, ModelStep, PrefillPlaces


class Inputs(NamedTuple):
    """What drives the state, token by token.

    A token with a step of 0 leaves the state as it is: that is how lines are padded.

    Attributes:
        values: ``[B, L, G, H, P]``.
        steps: ``[B, L, G, H]``, how much of a value enters and how fast the state decays.
        keys: ``[B, L, G, N]``, where a value is stored.
        queries: ``[B, L, G, N]``, what is read.
        decay: ``[G, H]``, negative.
    """

    values: Tensor
    steps: Tensor
    keys: Tensor
    queries: Tensor
    decay: Tensor


class Outputs(NamedTuple):
    """What came of lines of tokens.

    Attributes:
        read: ``[B, L, G, H, P]``.
        states: ``[B, L, G, H, P, N]``, after every token; of a scan ``[B, G, H, P, N]``, after
            every line.
    """

    read: Tensor
    states: Tensor


def convolve(lines: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel with its own taps along each line, then apply silu.

    Args:
        lines: ``[B, K - 1 + L, C]``.
        taps: ``[K, C]``, at least float32.
        bias: ``[C]`` or None.

    Returns:
        ``[B, L, C]``.
    """
    # torch's own convolution is slow where each channel stands alone
    wide, last = widened(lines), len(taps) - 1
    num_tokens = wide.shape[1] - last
    if num_tokens == 1:
        sums = (wide * taps).sum(dim=1, keepdim=True)
    else:
        sums = wide[:, last:] * taps[last]
        for tap in range(last):
            sums.addcmul_(wide[:, tap : tap + num_tokens], taps[tap])
    if bias is not None:
        sums += bias
    return F.silu(sums, inplace=True).to(lines.dtype)


def recur(inputs: Inputs, state: Tensor) -> Outputs:
    """Run token by token from ``state`` [B, G, H, P, N], and keep every state."""
    states, reads = [], []
    for token in range(inputs.values.shape[1]):
        step = inputs.steps[:, token]
        kept = torch.exp(step * inputs.decay)[..., None, None] * state
        gained = (step[..., None] * inputs.values[:, token])[..., None]
        # a state is large: each pass over it counts
        state = kept.addcmul_(gained, inputs.keys[:, token, :, None, None])
        states.append(state)
        # by far faster than as many products of a matrix and a vector
        reads.append((state * inputs.queries[:, token, :, None, None]).sum(dim=-1))
    if len(states) == 1:
        return Outputs(reads[0][:, None], states[0][:, None])
    return Outputs(torch.stack(reads, dim=1), torch.stack(states, dim=1))


def scan(
    inputs: Inputs, starts: Tensor, is_first: Tensor, before_all: Tensor | None = None
) -> Outputs:
    """Run lines that may follow on each other, all tokens of a line at once.

    Args:
        inputs: The lines.
        starts: ``[B, G, H, P, N]``, the state that each line's request began with.
        is_first: ``[B]`` bool, whether a line is its request's first; any other goes on
            from the line before it.
        before_all: ``[G, H, P, N]``, the state after the line before the first of these, which
            may go on from it.
    """
    decays = (inputs.steps * inputs.decay).cumsum(dim=1)
    stored = inputs.steps[..., None] * inputs.values
    kept = torch.exp(decays[:, -1])[..., None, None]
    to_end = torch.exp(decays[:, -1:] - decays)
    gained = torch.einsum("blghp,blgn->bghpn", stored * to_end[..., None], inputs.keys)
    state = torch.zeros_like(starts[0]) if before_all is None else before_all
    before, after = [], []
    for line in range(len(starts)):
        state = torch.where(is_first[line], starts[line], state)
        before.append(state)
        state = kept[line] * state + gained[line]
        after.append(state)
    read = _read_within(inputs, decays, stored)
    from_state = torch.einsum("blgn,bghpn->blghp", inputs.queries, torch.stack(before))
    return Outputs(read + torch.exp(decays)[..., None] * from_state, torch.stack(after))


def _read_within(inputs: Inputs, decays: Tensor, stored: Tensor) -> Tensor:
    """Return what each token reads of those before it in its own line."""
    spans = decays[:, :, None, :] - decays[:, None, :, :]
    num_tokens = decays.shape[1]
    past = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=spans.device).tril()
    kept = torch.exp(spans.masked_fill(~past[None, :, :, None, None], -torch.inf))
    matches = torch.einsum("blgn,bsgn->blsg", inputs.queries, inputs.keys)
    return torch.einsum("blsgh,bsghp->blghp", matches[..., None] * kept, stored)


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
        shared_size = config.num_groups * config.state_size
        self._mixed_sizes = [config.inner_size, shared_size, shared_size]
        self._projected_sizes = [config.inner_size, config.conv_channels, config.num_heads]
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
        gate, mixed, steps = self._scope.project(hidden, "in_proj").split_with_sizes(
            self._projected_sizes, dim=-1
        )
        decode, prefill = step.state_places(self._config.conv_kernel - 1)
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
        values, keys, queries = widened(convolved).split_with_sizes(self._mixed_sizes, dim=-1)
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
