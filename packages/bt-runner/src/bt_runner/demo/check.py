"""Every request against the dense reference: the same tokens, or where the two first differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bt_runner.dense import DenseModel, DenseOutput
from bt_runner.observer import Observation
from bt_runner.request import Request

_BOUNDS = {torch.float64: 0.0, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_NOISE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A token that the reference would not have chosen.

    Attributes:
        step: The step in which the two first differ.
        position: The place of the token whose output differs.
        layer: The lowest layer whose output differs there; None where only the logits do.
        tokens: The token chosen, and the reference's.
    """

    step: int
    position: int
    layer: int | None
    tokens: tuple[int, int]

    def __str__(self) -> str:
        """Say it in one line."""
        place = "the head" if self.layer is None else f"layer {self.layer}"
        chosen, wanted = self.tokens
        return (
            f"token {chosen} instead of {wanted}: first differs in step {self.step}, "
            f"at position {self.position}, in {place}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the comparison says about one request.

    Attributes:
        request_id: The request.
        num_tokens: Tokens compared.
        num_near_ties: Those that differ where rounding may decide.
        max_logit_difference: The largest difference of two logits.
        difference: The first that rounding does not explain, or None.
    """

    request_id: str
    num_tokens: int
    num_near_ties: int
    max_logit_difference: float
    difference: Difference | None


def near_tie_bound(dtype: torch.dtype) -> float:
    """Return the gap, relative to the scores' range, below which rounding may decide."""
    return _BOUNDS[dtype]


def check_request(
    model: DenseModel, request: Request, observations: Sequence[Observation]
) -> Verdict:
    """Compare a request's greedy tokens with what the reference chooses after the same ones.

    The reference reads the text whole. Where all choices agree it is by induction the text
    that it would have written itself.
    """
    dense = model.forward(request.tokens[:-1], model.new_cache())
    first = request.prompt_len - 1
    wanted = dense.logits[first:].argmax(dim=-1).tolist()
    wrong = [
        first + index
        for index, (ours, theirs) in enumerate(zip(request.output, wanted, strict=True))
        if ours != theirs
    ]
    ties = [position for position in wrong if _is_near_tie(dense, position)]
    serious = next((position for position in wrong if position not in ties), None)
    difference = None
    if serious is not None:
        tokens = (request.tokens[serious + 1], wanted[serious - first])
        difference = _first_difference(dense, observations, serious, tokens)
    kept = [each for each in observations if each.logits is not None]
    gaps = [
        (each.logits - dense.logits[each.position].cpu()).abs().max().item()
        for each in kept
        if each.logits is not None and each.position < len(dense.logits)
    ]
    return Verdict(
        request_id=request.request_id,
        num_tokens=len(wanted),
        num_near_ties=len(ties),
        max_logit_difference=max(gaps, default=0.0),
        difference=difference,
    )


def _is_near_tie(dense: DenseOutput, position: int) -> bool:
    """Say whether the choice of the token, or of what any token up to it saw, was close."""
    bound = near_tie_bound(dense.logits.dtype)
    best, second = dense.logits[position].topk(2).values
    if best - second < bound * dense.logits[position].abs().max():
        return True
    for choice in dense.choices:
        if choice is None:
            continue
        gaps = choice.gaps()[: position + 1]
        finite = choice.scores[: position + 1].masked_fill(choice.scores[: position + 1].isinf(), 0)
        if (gaps < bound * finite.abs().amax(dim=1)).any():
            return True
    return False


def _first_difference(
    dense: DenseOutput, observations: Sequence[Observation], position: int, tokens: tuple[int, int]
) -> Difference:
    noise = _NOISE[dense.logits.dtype]
    for seen in observations:
        if seen.position > position:
            continue
        for layer, output in enumerate(dense.layer_outputs):
            if _differs(seen.layer_outputs[layer], output[seen.position].cpu(), noise):
                return Difference(
                    step=seen.step, position=seen.position, layer=layer, tokens=tokens
                )
    step = next((seen.step for seen in observations if seen.position == position), 0)
    return Difference(step=step, position=position, layer=None, tokens=tokens)


def _differs(ours: Tensor, theirs: Tensor, noise: float) -> bool:
    difference = (ours.double() - theirs.double()).abs().max()
    # NaN compares as different
    return not bool(difference <= noise * theirs.double().abs().max())
