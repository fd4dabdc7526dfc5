"""Continues texts with a checkpoint's model, and shows what it writes as it writes it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bt_runner.devices import find_device
from bt_runner.drafters import NGramDrafter
from bt_runner.engine import Engine
from bt_runner.errors import BadInputError
from bt_runner.memory import memory_refused
from bt_runner.models.caches import CacheOptions
from bt_runner.models.checkpoint import (
    TextTokenizer,
    load_tokenizer,
    load_weights,
    read_config,
)
from bt_runner.models.config import ModelConfig
from bt_runner.models.sharding import Ranks
from bt_runner.processes import joined_ranks
from bt_runner.requests import SamplingParams
from bt_runner.terminal.prompts import read_prompt_lines
from bt_runner.terminal.running import tell_why_nothing_is_shared
from bt_width import ContextParallel, ServingLimits
from bt_width.errors import counted


@memory_refused()
def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code.

    Several processes that torchrun started share the attention caches; the first writes.

    Raises:
        BadInputError: The checkpoint, a prompt, a device or the file of prompts cannot be used.
        RequestRefusedError: A prompt is too long, or a pool too small for it.
    """
    device = find_device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    config = read_config(args.model)
    tokenizer = load_tokenizer(args.model)
    texts = [args.prompt] if args.prompts is None else _read_prompts(args.prompts)
    prompts = [_encode(tokenizer, text, config) for text in texts]
    with joined_ranks(device.type) as ranks:
        limits = _limits(args, config, max(map(len, prompts)), ranks)
        weights = load_weights(args.model, config, dtype=dtype, device=device)
        engine = Engine(
            config,
            weights,
            limits,
            options=CacheOptions(mamba_mode="align", num_speculative_blocks=args.drafts),
            num_blocks=args.num_blocks,
            drafter=NGramDrafter() if args.drafts else None,
            ranks=ranks,
            sanitizes=args.sanitize,
            prefix_caching=not args.no_prefix_caching,
            workspace_bytes=args.workspace,
        )
        if ranks.rank == 0:
            tell_why_nothing_is_shared(engine.prefixes)
        params = SamplingParams(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            seed=args.seed,
            stop_tokens=frozenset(config.stop_token_ids),
        )
        started = time.perf_counter()
        write = _write if ranks.rank == 0 else _keep_silent
        num_tokens = _stream(engine, tokenizer, texts, prompts, params, write)
        seconds = time.perf_counter() - started
        if ranks.rank == 0:
            tokens, steps = counted(num_tokens, "token"), counted(engine.num_steps, "step")
            print(f"{tokens} in {seconds:.1f} s, {steps}", file=sys.stderr)
    return 0


def _limits(
    args: argparse.Namespace, config: ModelConfig, longest_prompt: int, ranks: Ranks
) -> ServingLimits:
    max_model_len = args.max_model_len or longest_prompt + args.max_new_tokens
    if max_model_len > config.max_positions:
        advice = (
            "lower max_model_len"
            if args.max_model_len
            else "shorten the prompt or ask for fewer new tokens"
        )
        raise BadInputError(
            f"texts of {max_model_len} tokens are longer than the model's {config.max_positions} "
            f"positions: {advice}",
            max_model_len=max_model_len,
            max_positions=config.max_positions,
        )
    return ServingLimits(
        max_model_len=max_model_len,
        max_num_reqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_speculative_tokens=args.drafts,
        context_parallel=ContextParallel(
            size=ranks.size, rank=ranks.rank, interleave=args.interleave
        ),
    )


def _read_prompts(path: Path) -> list[str]:
    try:
        return [line.text.decode() for line in read_prompt_lines(path)]
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"cannot read prompts from {path}: not UTF-8 ({error.reason} in a line, byte "
            f"{error.start + 1})",
            path=str(path),
        ) from error


def _encode(tokenizer: TextTokenizer, text: str, config: ModelConfig) -> list[int]:
    token_ids = tokenizer.encode(text)
    if max(token_ids, default=0) >= config.vocab_size:
        raise BadInputError(
            f"the tokenizer gives token {max(token_ids)}, and the model knows "
            f"{config.vocab_size}: they do not belong together",
            token_id=max(token_ids),
            vocab_size=config.vocab_size,
        )
    return token_ids


def _stream(
    engine: Engine,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    write: Callable[[str], None],
) -> int:
    """Show all continuations; return how many tokens they have."""
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    places = {request.request_id: index for index, request in enumerate(requests)}
    streams = [tokenizer.stream() for _ in texts]
    # a single continuation stands alone, so that a pipe gets nothing else
    heads = [""] if len(texts) == 1 else [f"> {text}\n" for text in texts]
    printer = InOrder(heads, write)
    while engine.has_work:
        for output in engine.step():
            place = places[output.request_id]
            for token in output.new_tokens:
                printer.push(place, streams[place].push(token))
            if output.finish_reason is not None:
                printer.push(place, streams[place].flush())
                printer.finish(place)
    return sum(len(request.output) for request in requests)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _keep_silent(_: str) -> None:
    pass


class InOrder:
    """Writes the first unfinished text as it grows, and keeps the others back."""

    def __init__(self, heads: Sequence[str], write: Callable[[str], object]) -> None:
        """Take what stands above each text, and where to write."""
        self._heads = list(heads)
        self._waiting = [""] * len(heads)
        self._is_done = [False] * len(heads)
        self._write = write
        self._current = 0
        self._show(self._heads[0])

    def push(self, index: int, text: str) -> None:
        """Add to a text."""
        if index == self._current:
            self._show(text)
        else:
            self._waiting[index] += text

    def finish(self, index: int) -> None:
        """End a text; the next one that waits is shown as far as it is known."""
        self._is_done[index] = True
        while self._current < len(self._heads) and self._is_done[self._current]:
            self._show("\n")
            self._current += 1
            if self._current < len(self._heads):
                self._show(self._heads[self._current] + self._waiting[self._current])

    def _show(self, text: str) -> None:
        if text:
            self._write(text)
