"""Greedy decoding with the dense reference, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from bt_runner.dense import DenseModel


def dense_greedy(model: DenseModel, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens that follow a prompt, by a prefill and single steps."""
    cache = model.new_cache()
    new: list[int] = []
    inputs = list(token_ids)
    for _ in range(num_tokens):
        new.append(int(model.forward(inputs, cache).logits[-1].argmax()))
        inputs = new[-1:]
    return new
