"""The indexer's prefills: which requests are scored together, and what each token sees there."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..batch.common import CommonAttentionMetadata
from ..batch.geometry import RowGeometry, localise
from ..batch.split import BatchSplit, query_lens_of
from .metadata import DSAPrefillChunk
from .options import DSAOptions

_LOGIT_BYTES = 4


class ChunkPlan(NamedTuple):
    """One chunk in host numbers; requests count from the first that prefills.

    Attributes:
        first_req: The first request.
        num_reqs: Requests.
        first_token: The first token, counted from the first request's first.
        num_tokens: Tokens.
        num_keys: Keys of the requests, at most.
        gathers_keys: Whether they are not in the workspace already.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    num_keys: int
    gathers_keys: bool


class PrefillPart:
    """Plans chunks on the host and describes them on the device, without waiting for it."""

    def __init__(self, geometry: RowGeometry, options: DSAOptions) -> None:
        """Take the two budgets, in keys and in scores."""
        self._geometry = geometry
        self._max_keys = max(options.workspace_tokens // geometry.tokens_per_state, 1)
        self._max_scores = max(options.max_logits_bytes // _LOGIT_BYTES, 1)

    def build(
        self, common: CommonAttentionMetadata, split: BatchSplit
    ) -> tuple[DSAPrefillChunk, ...]:
        """Return the chunks of the requests that prefill."""
        if not split.num_prefills:
            return ()
        reqs = split.prefill_reqs
        query_lens = query_lens_of(common)[reqs].tolist()
        bounds = common.seq_lens_upper_bound_host[reqs].tolist()
        key_lens = [self._geometry.max_local_states(bound) for bound in bounds]
        plans = plan_chunks(query_lens, key_lens, self._max_keys, self._max_scores)
        view = _PrefillView(common, split, self._geometry)
        return tuple(view.describe(plan) for plan in plans)


def plan_chunks(
    query_lens: list[int], key_lens: list[int], max_keys: int, max_scores: int
) -> list[ChunkPlan]:
    """Pack requests in order while their keys and their scores fit the budgets.

    A request whose scores alone do not fit is cut by its tokens; one whose keys alone
    do not fit stands alone.

    Args:
        query_lens: Tokens of each request in this step.
        key_lens: Keys of each request, at most.
        max_keys: Keys of a chunk of several requests.
        max_scores: Scores of a chunk: its tokens times its keys.
    """
    plans: list[ChunkPlan] = []
    first_req = first_token = 0
    while first_req < len(query_lens):
        end, num_tokens, num_keys = first_req + 1, query_lens[first_req], key_lens[first_req]
        while end < len(query_lens):
            more_tokens, more_keys = num_tokens + query_lens[end], num_keys + key_lens[end]
            if more_keys > max_keys or more_tokens * more_keys > max_scores:
                break
            end, num_tokens, num_keys = end + 1, more_tokens, more_keys
        step = num_tokens
        if num_tokens * num_keys > max_scores:
            step = max(max_scores // num_keys, 1)
        for cut in range(0, num_tokens, step):
            size = min(step, num_tokens - cut)
            first = first_token + cut
            plans.append(
                ChunkPlan(first_req, end - first_req, first, size, num_keys, gathers_keys=cut == 0)
            )
        first_req, first_token = end, first_token + num_tokens
    return plans


class _PrefillView:
    """The prefilling part of a batch on the device, shared by its chunks."""

    def __init__(
        self, common: CommonAttentionMetadata, split: BatchSplit, geometry: RowGeometry
    ) -> None:
        self._first_req = split.num_decodes
        self._first_token = split.num_decode_tokens
        reqs = split.prefill_reqs
        tokens = slice(self._first_token, self._first_token + split.num_prefill_tokens)
        ratio = geometry.tokens_per_state
        self._block_table = common.block_table[reqs]
        self._num_keys = localise(common.seq_lens[reqs], geometry) // ratio
        ends = common.query_start_loc[reqs.start + 1 : reqs.stop + 1]
        places = torch.arange(
            tokens.start, tokens.stop, dtype=torch.int32, device=common.positions.device
        )
        self._req_of_token = torch.searchsorted(ends, places, right=True, out_int32=True)
        visible = common.positions[tokens].to(torch.int32) + 1
        self._visible_keys = localise(visible, geometry) // ratio

    def describe(self, plan: ChunkPlan) -> DSAPrefillChunk:
        """Return the chunk of ``plan``."""
        reqs = slice(plan.first_req, plan.first_req + plan.num_reqs)
        tokens = slice(plan.first_token, plan.first_token + plan.num_tokens)
        num_keys = self._num_keys[reqs]
        cu_seq_lens = num_keys.new_zeros(plan.num_reqs + 1)
        torch.cumsum(num_keys, 0, dtype=torch.int32, out=cu_seq_lens[1:])
        # starts on the device that disagree with the host's must not index past the chunk
        token_to_req = (self._req_of_token[tokens] - plan.first_req).clamp_(0, plan.num_reqs - 1)
        first_keys = cu_seq_lens[token_to_req]
        return DSAPrefillChunk(
            first_req=self._first_req + plan.first_req,
            num_reqs=plan.num_reqs,
            first_token=self._first_token + plan.first_token,
            num_tokens=plan.num_tokens,
            num_keys=plan.num_keys,
            gathers_keys=plan.gathers_keys,
            block_table=self._block_table[reqs],
            cu_seq_lens=cu_seq_lens,
            token_to_req=token_to_req,
            cu_seqlen_ks=first_keys,
            cu_seqlen_ke=first_keys + self._visible_keys[tokens],
        )
