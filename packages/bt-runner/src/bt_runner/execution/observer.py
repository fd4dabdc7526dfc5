"""What a run leaves behind for a comparison: the residual stream, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bt_runner.scheduling.step_plan import Scheduled


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
        scheduled: Sequence[Scheduled],
        layer_outputs: Sequence[Tensor],
        logits: Tensor,
    ) -> None:
        """Keep what a step computed.

        Args:
            step: The step.
            scheduled: Its batch.
            layer_outputs: The residual stream after each layer, ``[T, hidden]`` each.
            logits: ``[S, vocab]``, request by request as many as each has choices.
        """
        streams = torch.stack(tuple(layer_outputs)).cpu()
        logits = logits.cpu()
        token, choice = 0, 0
        for part in scheduled:
            next_token, next_choice = token + part.num_tokens, choice + part.num_choices
            self.observations[part.request.request_id].append(
                Observation(
                    step,
                    part.start,
                    part.token_ids,
                    streams[:, token:next_token],
                    logits[choice:next_choice],
                )
            )
            token, choice = next_token, next_choice
