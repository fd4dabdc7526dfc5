"""Every request against the dense reference: the same tokens, or where the two first differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bt_runner.dense import DenseModel, DenseOutput
from bt_runner.recorder import Observation
from bt_runner.requests import Request

# gaps of two scores, as a share of the largest score, that rounding may close
_NEAR_TIES = {torch.float64: 0.0, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# differences of two numbers, as a share of the largest of them, that rounding explains
_NOISE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a request first parts from the reference.

    Attributes:
        step: The step.
        position: The token's place in its request.
        layer: The lowest layer whose output differs; None where only the head's does.
        tokens: The first token chosen that the reference would not have chosen, and the
            reference's; None where all are the same.
    """

    step: int
    position: int
    layer: int | None
    tokens: tuple[int, int] | None

    def __str__(self) -> str:
        """Say it in one line."""
        place = "the head" if self.layer is None else f"layer {self.layer}"
        what = (
            "same tokens" if self.tokens is None else "token {} instead of {}".format(*self.tokens)
        )
        return f"{what}; first differs in step {self.step}, at position {self.position}, in {place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the comparison says about one request.

    Attributes:
        request_id: The request.
        num_tokens: Tokens compared.
        num_near_ties: Those that differ where rounding may decide.
        max_logit_difference: The largest difference of two logits.
        difference: One that rounding does not explain, or None.
    """

    request_id: str
    num_tokens: int
    num_near_ties: int
    max_logit_difference: float
    difference: Difference | None


def near_tie_bound(dtype: torch.dtype) -> float:
    """Return the gap, relative to the scores' range, below which rounding may decide."""
    return _NEAR_TIES[dtype]


def check_request(
    model: DenseModel, request: Request, observations: Sequence[Observation]
) -> Verdict:
    """Compare a request's greedy tokens with what the reference chooses after the same ones.

    The reference reads the text whole. Where all choices agree it is by induction the text
    that it would have written itself. In float64, where rounding explains nothing, other
    logits are a difference even if the tokens are the same.
    """
    dense = model.forward(request.tokens[:-1], model.new_cache())
    first = request.prompt_len - 1
    wanted = dense.logits[first:].argmax(dim=-1).tolist()
    pairs = enumerate(zip(request.output, wanted, strict=True), first)
    wrong = [position for position, (ours, theirs) in pairs if ours != theirs]
    serious = [position for position in wrong if not _is_near_tie(dense, position)]
    largest = max(_logit_differences(dense, request, observations), default=0.0)
    is_exact = near_tie_bound(dense.logits.dtype) == 0
    difference = None
    if serious or (is_exact and not largest <= _noise(dense.logits)):
        tokens = None
        if serious:
            tokens = (request.tokens[serious[0] + 1], wanted[serious[0] - first])
        difference = _first_difference(dense, request, observations, tokens)
    return Verdict(
        request_id=request.request_id,
        num_tokens=len(wanted),
        num_near_ties=len(wrong) - len(serious),
        max_logit_difference=largest,
        difference=difference,
    )


def _is_near_tie(dense: DenseOutput, position: int) -> bool:
    """Say whether the choice of the token, or of what any token up to it saw, was close."""
    bound = near_tie_bound(dense.logits.dtype)
    best, second = dense.logits[position].topk(2).values
    if best - second < bound * dense.logits[position].abs().max():
        return True
    for choice in dense.choices:
        if choice is not None:
            scores = choice.scores[: position + 1]
            ranges = scores.masked_fill(scores.isinf(), 0).abs().amax(dim=1)
            if (choice.gaps()[: position + 1] < bound * ranges).any():
                return True
    return False


def _same_text(request: Request, seen: Observation) -> int:
    """Return how many leading tokens of an observation are the request's: not rejected drafts."""
    text = request.tokens[seen.start : len(request.tokens) - 1]
    same = 0
    while same < min(len(text), len(seen.token_ids)) and text[same] == seen.token_ids[same]:
        same += 1
    return same


def _logit_differences(
    dense: DenseOutput, request: Request, observations: Sequence[Observation]
) -> Iterator[float]:
    for seen in observations:
        first = len(seen.token_ids) - len(seen.logits)
        num_kept = _same_text(request, seen) - first
        if num_kept > 0:
            start = seen.start + first
            theirs = dense.logits[start : start + num_kept].cpu()
            yield _distance(seen.logits[:num_kept], theirs).max().item()


def _first_difference(
    dense: DenseOutput,
    request: Request,
    observations: Sequence[Observation],
    tokens: tuple[int, int] | None,
) -> Difference:
    for seen in observations:
        num_kept = _same_text(request, seen)
        places = slice(seen.start, seen.start + num_kept)
        for layer, output in enumerate(dense.layer_outputs):
            theirs = output[places].cpu()
            distance = _distance(seen.layer_outputs[layer, :num_kept], theirs).amax(dim=1)
            wrong = (~(distance <= _noise(theirs))).nonzero()
            if len(wrong):
                position = seen.start + int(wrong[0])
                return Difference(step=seen.step, position=position, layer=layer, tokens=tokens)
    last = observations[-1]
    return Difference(step=last.step, position=last.start, layer=None, tokens=tokens)


def _distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the differences of all numbers; infinite where one is NaN."""
    return (ours.double() - theirs.double()).abs().nan_to_num(nan=torch.inf)


def _noise(values: Tensor) -> float:
    """Return the difference that rounding explains."""
    return _NOISE[values.dtype] * (values.abs().max().item() if values.numel() else 0.0)
