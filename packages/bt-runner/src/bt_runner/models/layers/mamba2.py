"""A Mamba2 mixer whose states live in blocks: read and written where the metadata says."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bt_builders import MambaMetadata, MambaStates
from bt_runner.models.cache.cache_groups import CHUNK_SIZE
from bt_runner.models.cache.paging import write
from bt_runner.models.config import MambaLayer
from bt_runner.models.layers.numerics import rms_norm, widened
from bt_runner.models.layers.pieces import WORKSPACE_BYTES, pieces
from bt_runner.models.layers.recurrence import Convolved, Inputs, convolve, recur, scan
from bt_runner.models.weights import Weights


class Mamba2Mixer:
    """The mixer of one layer."""

    def __init__(
        self,
        config: MambaLayer,
        weights: Weights,
        prefix: str,
        eps: float,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """Take the tensors named after ``prefix``."""
        self._workspace_bytes = workspace_bytes
        self._config = config
        self._weights = weights
        self._prefix = prefix
        self._eps = eps
        self._decay = -torch.exp(widened(self._weight("A_log")))

    def __call__(
        self,
        hidden: Tensor,
        metadata: MambaMetadata,
        req_of_token: Tensor,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        """Return the mixer's output for ``hidden`` [T, hidden], and move the states on.

        Args:
            hidden: The step's tokens, after the layer's norm.
            metadata: Which tokens decode, and where every request's states lie.
            req_of_token: ``[T]``, each token's request.
            conv_cache: ``[blocks, K - 1, C]``, the convolution's last inputs.
            state_cache: ``[blocks, H, P, N]``.
        """
        config = self._config
        gate, mixed, steps = self._linear("in_proj", hidden).split_with_sizes(
            [config.inner_size, config.conv_channels, config.num_heads], dim=-1
        )
        before = _source(metadata.states, conv_cache)
        bias = self._weights.get(f"{self._prefix}conv1d.bias")
        convolved = convolve(mixed, before, req_of_token, self._weight("conv1d.weight"), bias)
        self._keep_windows(convolved, metadata, conv_cache)
        inputs = self._inputs(convolved.outputs, steps)
        read = torch.cat(
            (
                self._decode(inputs, metadata, state_cache),
                self._prefill(inputs, metadata, state_cache),
            )
        )
        read = read + inputs.values[0] * widened(self._weight("D"))[:, None]
        return self._output(read.flatten(1), gate)

    def _inputs(self, convolved: Tensor, steps: Tensor) -> Inputs:
        """Return the recurrence's inputs as one line of T tokens."""
        config = self._config
        size = config.num_groups * config.state_size
        values, keys, queries = widened(convolved).split_with_sizes(
            [config.inner_size, size, size], dim=-1
        )

        def per_head(shared: Tensor) -> Tensor:
            grouped = shared.view(1, -1, config.num_groups, config.state_size)
            return grouped.repeat_interleave(config.num_heads // config.num_groups, dim=2)

        return Inputs(
            values=values.view(1, -1, config.num_heads, config.head_dim),
            steps=F.softplus(widened(steps) + widened(self._weight("dt_bias")))[None],
            keys=per_head(keys),
            queries=per_head(queries),
            decay=self._decay,
        )

    def _decode(self, inputs: Inputs, metadata: MambaMetadata, cache: Tensor) -> Tensor:
        """Run the requests that decode token by token; return ``[tokens, H, P]``."""
        part = metadata.decode
        if part.num_tokens == 0:
            return inputs.values[0, :0]
        starts, ends = part.query_start_loc[:-1, None], part.query_start_loc[1:, None]
        offsets = torch.arange(part.max_query_len, device=starts.device)
        is_token = starts + offsets < ends
        tokens = (starts + offsets).clamp(max=part.num_tokens - 1)
        outputs = recur(_take(inputs, tokens, is_token), _source(part.states, cache))
        ids = part.states.state_ids[:, : part.max_query_len].where(is_token, 0)
        write(cache, ids.flatten(), outputs.states.flatten(0, 1))
        req_of_token = torch.searchsorted(
            part.query_start_loc[1:].contiguous(),
            torch.arange(part.num_tokens, device=starts.device),
            right=True,
        ).clamp(max=part.num_reqs - 1)
        places = torch.arange(part.num_tokens, device=starts.device) - starts[req_of_token, 0]
        return outputs.read[req_of_token, places.clamp(max=part.max_query_len - 1)]

    def _prefill(self, inputs: Inputs, metadata: MambaMetadata, cache: Tensor) -> Tensor:
        """Run the requests that prefill chunk by chunk; return ``[tokens, H, P]``."""
        part = metadata.prefill
        if part.num_tokens == 0:
            return inputs.values[0, :0]
        chunks = part.chunks
        starts, ends = chunks.cu_chunk_seqlens[:-1, None], chunks.cu_chunk_seqlens[1:, None]
        offsets = torch.arange(min(CHUNK_SIZE, part.num_tokens), device=starts.device)
        is_token = starts + offsets < ends
        tokens = (starts + offsets).clamp(max=part.num_tokens - 1)
        req_of_chunk = chunks.seq_idx.to(torch.int64)
        is_first = torch.cat((req_of_chunk.new_ones(1), req_of_chunk.diff())) != 0
        starting = _source(part.states, cache)
        last_states = torch.empty_like(starting)
        state = torch.zeros_like(starting[0])
        read = inputs.values.new_zeros(part.num_tokens + 1, *inputs.values.shape[2:])
        places = tokens.where(is_token, part.num_tokens)
        bytes_per_line = self._bytes_of_line(tokens.shape[1])
        for span in pieces(len(tokens), bytes_per_line, self._workspace_bytes):
            lines = _take(inputs, part.first_token + tokens[span], is_token[span])
            outputs = scan(lines, starting[req_of_chunk[span]], is_first[span], state)
            state = outputs.states[-1]
            read[places[span]] = outputs.read
            last = chunks.last_chunk_indices - span.start
            is_here = ((last >= 0) & (last < len(outputs.states)))[:, None, None, None]
            found = outputs.states[last.clamp(0, len(outputs.states) - 1)]
            last_states = torch.where(is_here, found, last_states)
        write(cache, part.states.state_ids[:, 0], last_states)
        return read[:-1]

    def _bytes_of_line(self, num_tokens: int) -> int:
        """Return the bytes that the scan of a line of so many tokens takes."""
        config = self._config
        per_head = config.head_dim * config.state_size
        per_pair = 4 * num_tokens * num_tokens
        per_token = num_tokens * (3 * config.head_dim + 3 * config.state_size)
        numbers = config.num_heads * (5 * per_head + per_pair + per_token)
        return numbers * self._decay.element_size()

    def _keep_windows(self, convolved: Convolved, metadata: MambaMetadata, cache: Tensor) -> None:
        """Write the convolution's last inputs after every token that may be the last one kept."""
        offsets = torch.arange(-cache.shape[1] + 1, 1, device=cache.device)
        decode, prefill = metadata.decode, metadata.prefill
        if decode.num_tokens:
            starts, ends = decode.query_start_loc[:-1, None], decode.query_start_loc[1:, None]
            tokens = starts + torch.arange(decode.max_query_len, device=cache.device)
            ids = decode.states.state_ids[:, : decode.max_query_len].where(tokens < ends, 0)
            places = convolved.places[tokens.clamp(max=decode.num_tokens - 1).flatten()]
            write(cache, ids.flatten(), convolved.line[places[:, None] + offsets])
        if prefill.num_tokens:
            last = prefill.first_token + prefill.query_start_loc[1:] - 1
            windows = convolved.line[convolved.places[last][:, None] + offsets]
            write(cache, prefill.states.state_ids[:, 0], windows)

    def _output(self, read: Tensor, gate: Tensor) -> Tensor:
        gated = (read * F.silu(widened(gate))).view(len(read), self._config.num_groups, -1)
        norm = self._weight("norm.weight").view(self._config.num_groups, -1)
        return self._linear("out_proj", rms_norm(gated, norm, self._eps).flatten(1))

    def _weight(self, name: str) -> Tensor:
        return self._weights[f"{self._prefix}{name}"]

    def _linear(self, name: str, values: Tensor) -> Tensor:
        weight = self._weight(f"{name}.weight")
        bias = self._weights.get(f"{self._prefix}{name}.bias")
        return F.linear(values.to(weight.dtype), weight, bias)


def _source(states: MambaStates, cache: Tensor) -> Tensor:
    """Return the state that each request starts from, zero where it starts from nothing."""
    return cache[states.source_ids].masked_fill(
        ~states.has_initial_states.view(-1, *(1,) * (cache.dim() - 1)), 0
    )


def _take(inputs: Inputs, tokens: Tensor, is_token: Tensor) -> Inputs:
    """Return one line per row of ``tokens`` [B, L] from a single line; the rest is padding."""
    return Inputs(
        values=inputs.values[0, tokens],
        steps=inputs.steps[0, tokens].masked_fill(~is_token[..., None], 0),
        keys=inputs.keys[0, tokens],
        queries=inputs.queries[0, tokens],
        decay=inputs.decay,
    )
