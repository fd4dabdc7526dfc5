"""What a run leaves behind for a comparison: the residual stream, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bt_runner.scheduler import Scheduled


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step computed for the last token it took of a request, or for one it chose after.

    Attributes:
        step: The step.
        position: The token's place in its request.
        layer_outputs: ``[layers, hidden]``, the residual stream after each layer.
        logits: ``[vocab]``; None in the midst of a prompt.
    """

    step: int
    position: int
    layer_outputs: Tensor
    logits: Tensor | None


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
        """Keep a step's last tokens.

        Args:
            step: The step.
            scheduled: Its batch.
            layer_outputs: The residual stream after each layer, ``[T, hidden]`` each.
            logits: ``[S, vocab]``, request by request as many as each has choices.
        """
        end, next_logits = 0, 0
        for part in scheduled:
            end += len(part.token_ids)
            num_kept = max(part.num_choices, 1)
            streams = torch.stack([layer[end - num_kept : end] for layer in layer_outputs], dim=1)
            for index, stream in enumerate(streams.cpu()):
                row = logits[next_logits + index].cpu() if part.num_choices else None
                position = part.seq_len - num_kept + index
                self.observations[part.request.request_id].append(
                    Observation(step, position, stream, row)
                )
            next_logits += part.num_choices
