"""Keeps what a run computed, for a comparison: the residual stream and logits, step by step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bt_runner.requests import RunningRequests
from bt_runner.scheduler import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step computed for one request.

    Attributes:
        step: The step.
        start: Place of the first token in its request.
        token_ids: What was computed, drafts included.
        layer_outputs: ``[layers, tokens, hidden]``, the residual stream after each layer.
        logits: ``[choices, vocab]``, of the last tokens; none in the midst of a prompt.
    """

    step: int
    start: int
    token_ids: list[int]
    layer_outputs: Tensor
    logits: Tensor


class Recorder:
    """Keeps what was observed, by request; an engine calls it once a step.

    Attributes:
        observations: By request id, in the order of the steps.
    """

    def __init__(self) -> None:
        """Start with nothing observed."""
        self.observations: defaultdict[str, list[Observation]] = defaultdict(list)

    def record(
        self,
        step: int,
        batch: SchedulerOutput,
        table: RunningRequests,
        streams: Tensor,
        logits: Tensor,
    ) -> None:
        """Keep what a step computed, but for requests that had ended before it did.

        Args:
            step: The step.
            batch: Its batch.
            table: The requests that run.
            streams: ``[layers, T, hidden]``, the residual stream after each layer.
            logits: ``[S, vocab]``, request by request as many as each has choices.
        """
        streams, logits = streams.cpu(), logits.cpu()
        token, choice = 0, 0
        for place, request in enumerate(batch.requests):
            start, num_tokens = int(batch.starts[place]), int(batch.num_tokens[place])
            next_token, next_choice = token + num_tokens, choice + int(batch.num_choices[place])
            if request.finish_reason is None:
                positions = np.arange(start, start + num_tokens)
                token_ids = request.token_array[start : start + num_tokens].tolist()
                if len(token_ids) < num_tokens:
                    rows = np.full(num_tokens, batch.rows[place])
                    token_ids = table.read(rows, positions).tolist()
                self.observations[request.request_id].append(
                    Observation(
                        step,
                        start,
                        token_ids,
                        streams[:, token:next_token],
                        logits[choice:next_choice],
                    )
                )
            token, choice = next_token, next_choice
