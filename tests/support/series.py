"""Numbers of steps for pages, drawn from a seed."""

import numpy as np

from bt_runner.report.series import StepSeries

PHASES = (
    "schedule",
    "stage",
    "edits",
    "input batch",
    "tables.step",
    "metadata",
    "launched",
    "account",
    "the rest",
)


def random_series(num_steps: int, *, name: str = "mla", seed: int = 0) -> StepSeries:
    """Two groups, some preemptions, as many phases as the longest report has."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(1, 500, num_steps)
    return StepSeries(
        groups=(name, "mamba"),
        pool_blocks=(1_000, 64),
        used_blocks=np.stack(
            [draw.integers(0, 999, num_steps), draw.integers(0, 63, num_steps)], axis=1
        ),
        running=draw.integers(0, 64, num_steps),
        waiting=draw.integers(0, 9, num_steps),
        preempted=(draw.random(num_steps) < 0.05).astype(np.int64),
        prompt_tokens=prompts,
        hit_tokens=prompts // 3,
        bytes_sent=draw.integers(100, 9_000, num_steps),
        phases=PHASES,
        phase_seconds=draw.gamma(2, 1e-4, (num_steps, len(PHASES))),
    )
