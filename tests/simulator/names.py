"""Names of texts: what a cached state was computed from, and the token that follows it.

Instead of numbers, simulated caches hold names. A name stands for a list of tokens, and the
token after those follows from it, so whoever knows a prompt knows the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from bt_runner.arrays import Ints
from bt_runner.requests import Request

Name: TypeAlias = int

VOCAB = 3
"""So few tokens that texts often begin alike."""

NO_TOKENS: Name = 17
NO_NAME: Name = 0
"""What a cache holds where nothing was computed."""

_Names = TypeVar("_Names", int, torch.Tensor)


def name_after(name: Name, token: int) -> Name:
    """Return the name of a text and one more token."""
    return (name * 6364136223846793005 + token + 1442695040888963407) % (2**61 - 1)


def token_after(name: _Names) -> _Names:
    """Return the token that follows each text."""
    return (name >> 20) % VOCAB


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens that follow a prompt."""
    name, tokens = NO_TOKENS, []
    for token in prompt:
        name = name_after(name, token)
    for _ in range(num_tokens):
        tokens.append(token_after(name))
        name = name_after(name, tokens[-1])
    return tokens


class Text:
    """A request's prompt and answer, as they must come to be.

    Attributes:
        request: The request.
        tokens: Its tokens at its longest.
        names: The names of no token, the first, the first two ...
    """

    def __init__(self, request: Request) -> None:
        """Compute the whole text."""
        prompt = request.token_array[: request.prompt_len].tolist()
        tokens = prompt + answer(prompt, request.params.max_new_tokens)
        names = [NO_TOKENS]
        for token in tokens:
            names.append(name_after(names[-1], token))
        self.request = request
        self.tokens = tokens
        self.names: Ints = np.array(names, np.int64)

    def names_with(self, num_known: int, drafts: Sequence[int]) -> Ints:
        """Return the names of its first tokens, and of those with drafts behind them."""
        if not drafts:
            return self.names[: num_known + 1]
        names = [int(self.names[num_known])]
        for token in drafts:
            names.append(name_after(names[-1], token))
        return np.concatenate((self.names[:num_known], np.array(names, np.int64)))
