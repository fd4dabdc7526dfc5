"""Launches the builders' kernels on a GPU that is not there, and prints their compilations."""

from __future__ import annotations

import json
import random

import torch
from tests.support import stub_gpu
from tests.support.addressings import rows as rows_of
from tests.support.addressings import states

from bt_builders import kernels
from bt_builders.operations import (
    CommittedStates,
    DraftRows,
    ExpandedRows,
    MambaStates,
    StateBatch,
    TokenLens,
)

NAMES = (
    "commit_states",
    "compress_slots",
    "expand_rows",
    "state_ids",
    "step_drafts",
    "token_lens",
)
ROWS = rows_of(4096, 64, 4, 2, 1, 16, 500_000)
STATES = states(4096, 64, 4)
WIDTH = 4096


def main() -> None:
    """Run 60 steps of different sizes and print what they compiled."""
    stub_gpu.install()
    recorders = {}
    for name in NAMES:
        module = kernels.states if name.endswith(("_states", "_ids")) else kernels.tokens
        recorders[name] = stub_gpu.Recorder(getattr(module, f"{name}_kernel"))
        setattr(module, f"{name}_kernel", recorders[name])
    draw = random.Random(0)
    for step in range(60):
        launch_all(draw, max(step, 1), max(draw.choice([1, 2, 15, 16, 17, 128, 200]), 1))
    print(
        json.dumps(
            {
                "launches": sum(recorder.launches for recorder in recorders.values()),
                "compilations": {name: each.compilations for name, each in recorders.items()},
            }
        )
    )


def launch_all(draw: random.Random, num_reqs: int, num_tokens: int) -> None:
    """Launch every kernel once, on views that start anywhere."""

    def ints(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        start = draw.randrange(4)
        return torch.zeros(count + 4, dtype=dtype)[start : start + count]

    def longs(count: int) -> torch.Tensor:
        return ints(count, torch.int64)

    def table(rows: int, columns: int) -> torch.Tensor:
        stride = columns + draw.randrange(4)
        return torch.empty(rows * stride, dtype=torch.int32).as_strided(
            (rows, columns), (stride, 1)
        )

    lens = TokenLens(ints(num_tokens), ints(num_tokens))
    rows = ExpandedRows(table(num_tokens, WIDTH), ints(num_tokens))
    starts, seq_lens = ints(num_reqs + 1), ints(num_reqs)
    source = table(num_reqs, WIDTH)
    kernels.token_lens(*ROWS, starts, seq_lens, lens)
    kernels.expand_rows(*ROWS, starts, seq_lens, source, lens, rows)
    kernels.compress_slots(
        ROWS.tokens_per_state, longs(num_tokens), longs(num_tokens), longs(num_tokens)
    )
    drafts = DraftRows(ints(num_reqs), ints(num_reqs), longs(num_reqs), longs(num_reqs))
    kernels.step_drafts(*ROWS, source, drafts, draw.randrange(2))
    batch = StateBatch(source, ints(num_reqs), seq_lens, ints(num_reqs))
    flags = torch.zeros(2, num_reqs, dtype=torch.bool)
    kernels.state_ids(
        STATES,
        0,
        batch,
        MambaStates(ints(num_reqs), table(num_reqs, 4), ints(num_reqs), flags[0], flags[1]),
    )
    copies = torch.empty(2, num_reqs, 1 + draw.randrange(3), dtype=torch.int32)[:, :, :1]
    kernels.commit_states(
        STATES, 0, batch, ints(num_reqs), CommittedStates(copies[0], copies[1], ints(num_reqs))
    )


if __name__ == "__main__":
    main()
