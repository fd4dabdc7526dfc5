"""Random requests whose answers are known, and drafts of those answers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from tests.simulator.scenario import Serving

from bt_runner.errors import VerificationError
from bt_runner.requests import FinishReason, Request, SamplingParams
from bt_runner.scheduler import StepOutput

Answer: TypeAlias = Callable[[list[int], int], list[int]]
"""Returns the tokens that follow a prompt, as many as asked."""

_NUM_TEXTS = 6
_SHARED_LEN = 48


class ExpectedRequest:
    """A request, and what must come of it.

    Attributes:
        request: The request.
        text: Its prompt and answer, as if no stop token ended it.
        wanted: The tokens it must be given.
    """

    def __init__(self, request: Request, answer: list[int]) -> None:
        """Take what follows its prompt."""
        self.request = request
        self.text = request.tokens + answer
        stops = [place for place, each in enumerate(answer) if each in request.params.stop_tokens]
        self.wanted = answer[: stops[0] + 1] if stops else answer
        self._num_given = 0

    def give(self, output: StepOutput) -> None:
        """Take what a step gave it.

        Raises:
            VerificationError: It is not what follows, or ends too early or too late.
        """
        end = self._num_given + len(output.new_tokens)
        wanted = self.wanted[self._num_given : end]
        self._num_given = end
        ends = None
        if end == len(self.wanted):
            stops = self.wanted[-1] in self.request.params.stop_tokens
            ends = FinishReason.STOP if stops else FinishReason.LENGTH
        self._require("was given", output.new_tokens, wanted)
        self._require("ended because of", output.finish_reason, ends)
        if ends is not None:
            self._require("has", self.request.output, self.wanted)

    def abort(self) -> None:
        """See that it has got a part of its answer when it is aborted."""
        output = self.request.output
        self._require("had", output, self.wanted[: len(output)])
        self._require("ended because of", self.request.finish_reason, FinishReason.ABORTED)

    def _require(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            name = self.request.request_id
            raise VerificationError(
                f"request {name} {what} {found}, not {expected}",
                request=name,
                expected=expected,
                found=found,
            )


class Traffic:
    """Draws requests: many begin as others do, or with another request and its answer.

    Attributes:
        num_requests: How many were drawn.
        live: Those that were drawn and have not ended, by name.
    """

    def __init__(
        self, serving: Serving, vocab_size: int, answer: Answer, draw: random.Random
    ) -> None:
        """Take what requests have to fit, and what follows a prompt."""
        self._max_len = serving.limits.max_model_len
        self._scale = serving.scale
        self._vocab_size = vocab_size
        self._answer = answer
        self._draw = draw
        self.live: dict[str, ExpectedRequest] = {}
        self.num_requests = 0
        self._texts = deque([self._some(_SHARED_LEN) for _ in range(3)], _NUM_TEXTS)

    def next(self) -> ExpectedRequest:
        """Draw a request."""
        draw = self._draw
        prompt = self._prompt()[: self._max_len - 1]
        num_new = draw.randint(1, draw.choice(self._scale.answer_lens))
        num_new = min(num_new, self._max_len - len(prompt))
        answer = self._answer(prompt, num_new)
        stop_tokens = frozenset([draw.choice(answer)] if draw.random() < 0.2 else [])
        params = SamplingParams(max_new_tokens=num_new, stop_tokens=stop_tokens)
        name = f"request-{self.num_requests}"
        self.num_requests += 1
        expected = ExpectedRequest(Request(name, np.array(prompt, np.int32), params), answer)
        self.live[name] = expected
        return expected

    def end(self, request_id: str) -> None:
        """Forget a request that has ended; now and then, let others begin with it."""
        request = self.live.pop(request_id).request
        if self._draw.random() < 0.3:
            self._texts.append(request.tokens)

    def _prompt(self) -> list[int]:
        draw = self._draw
        longest = draw.choice(self._scale.prompt_lens)
        text = draw.choice(self._texts)
        if draw.random() < 0.3:
            # the whole of it, and more
            return text + self._some(draw.randint(0, 5))
        length = draw.randint(1, longest)
        if draw.random() < 0.5:
            # around the ends of blocks
            length = max(length - length % 4 + draw.choice([-1, 0, 1]), 1)
        shared = text[:length]
        return shared + self._some(max(length - len(shared), draw.choice([0, 0, 1, 5])))

    def _some(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(count)]


class Drafts:
    """Proposes what follows in the texts of the requests there are, right as often as asked."""

    def __init__(
        self, serving: Serving, traffic: Traffic, vocab_size: int, draw: random.Random
    ) -> None:
        """Take how good the drafts are, and whose requests they are for."""
        self._serving = serving
        self._live = traffic.live
        self._vocab_size = vocab_size
        self._draw = draw

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Return what follows ``tokens`` in the text that begins with them, partly spoiled."""
        known = list(tokens)
        texts = (expected.text for expected in self._live.values())
        text = next(text for text in texts if text[: len(known)] == known)
        count = self._draw.randint(0, max_drafts) if self._serving.is_ragged else max_drafts
        return [
            token
            if self._draw.random() < self._serving.acceptance
            else (token + 1) % self._vocab_size
            for token in text[len(known) : len(known) + count]
        ]
