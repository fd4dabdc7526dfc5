"""What a replay did and what it cost: counted step by step, told as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bt_runner.block_pool import BlockPool
from bt_width.errors import counted


@dataclass(slots=True, eq=False)
class Summary:
    """The figures of a replay.

    Attributes:
        groups: What the cache groups are called.
        num_requests: Requests that ran to their end.
        num_refused: Requests that could never have run.
        num_malformed: Lines of the trace that are not a request.
        num_steps: Steps.
        num_tokens: Tokens computed, drafts and repetitions included.
        num_output_tokens: Tokens that requests got.
        num_preemptions: Times a request gave up its blocks.
        hit_tokens: Prompt tokens that requests shared with others when they first ran.
        rehit_tokens: Prompt tokens that they found again after they had lost their blocks.
        prompt_tokens: Prompt tokens of the requests that entered.
        num_checked_steps: Steps whose tables were compared with the contract.
        num_launches: Launches of table updates.
        num_copies: Copies to the device of table updates.
        num_bytes: Bytes of those copies.
        seconds: Time of the whole replay.
        pool_blocks: Blocks of each group's pool.
        table_seconds: Host time of each step's table update.
        builder_seconds: Host time of each step's builders.
        used_blocks: Blocks in use in each step, group by group.
    """

    groups: tuple[str, ...]
    num_requests: int = 0
    num_refused: int = 0
    num_malformed: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    hit_tokens: int = 0
    rehit_tokens: int = 0
    prompt_tokens: int = 0
    num_checked_steps: int = 0
    num_launches: int = 0
    num_copies: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    pool_blocks: tuple[int, ...] = ()
    table_seconds: list[float] = field(default_factory=list)
    builder_seconds: list[float] = field(default_factory=list)
    used_blocks: list[list[int]] = field(default_factory=list)

    def note_blocks(self, pools: Sequence[BlockPool]) -> None:
        """Count the blocks in use."""
        self.used_blocks.append([pool.num_used for pool in pools])

    def to_record(self) -> dict[str, Any]:
        """Return the figures as JSON has them; times in microseconds, but ``seconds``."""
        steps = max(self.num_steps, 1)
        used = np.array(self.used_blocks or [[0] * len(self.groups)])
        counts = (
            "num_requests num_refused num_malformed num_steps num_tokens num_output_tokens "
            "num_preemptions prompt_tokens hit_tokens rehit_tokens num_checked_steps"
        )
        return {
            **{name: getattr(self, name) for name in counts.split()},
            "seconds": round(self.seconds, 1),
            "launches_per_step": round(self.num_launches / steps, 3),
            "copies_per_step": round(self.num_copies / steps, 3),
            "bytes_per_step": round(self.num_bytes / steps),
            "table_update_us": _median_and_p99(self.table_seconds),
            "builders_us": _median_and_p99(self.builder_seconds),
            "groups": [
                {
                    "name": name,
                    "pool_blocks": self.pool_blocks[group],
                    "peak_blocks": int(used[:, group].max()),
                    "mean_blocks": round(float(used[:, group].mean())),
                }
                for group, name in enumerate(self.groups)
            ],
        }

    def to_text(self) -> str:
        """Return the figures as lines for a person."""
        lines = self.to_lines()
        width = max(map(len, lines))
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines.items())

    def to_lines(self) -> dict[str, str]:
        """Return the figures in words, by name."""
        record = self.to_record()
        pairs = [
            ("requests", f"{self.num_requests:,} ended, {self.num_refused:,} refused"),
            ("malformed lines", f"{self.num_malformed:,}"),
            ("steps", f"{self.num_steps:,} in {self.seconds:.1f} s"),
            ("tokens", f"{self.num_tokens:,} computed, {self.num_output_tokens:,} put out"),
            ("preemptions", f"{self.num_preemptions:,}"),
            ("shared prompt tokens", self._shared()),
            *(
                (
                    f"blocks of {group['name']}",
                    f"{group['peak_blocks']:,} at peak, {group['mean_blocks']:,} on average, "
                    f"of {group['pool_blocks']:,}",
                )
                for group in record["groups"]
            ),
            (
                "a step sends",
                f"{record['bytes_per_step']:,} bytes in {record['copies_per_step']} copies and "
                f"{record['launches_per_step']} launches",
            ),
            ("table update", _times(record["table_update_us"])),
            ("builders", _times(record["builders_us"])),
            ("checked", f"{counted(self.num_checked_steps, 'step', mark=',')}, no difference"),
        ]
        return dict(pairs)

    def _shared(self) -> str:
        """Say what was shared between requests, and what preempted ones found again."""
        share = self.hit_tokens / max(self.prompt_tokens, 1)
        again = f", and {self.rehit_tokens:,} again after preemptions" if self.rehit_tokens else ""
        return f"{self.hit_tokens:,} of {self.prompt_tokens:,} ({share:.1%}){again}"


def _median_and_p99(seconds: Sequence[float]) -> dict[str, float]:
    median, p99 = np.percentile(np.array(seconds or [0.0]) * 1e6, (50, 99)).tolist()
    return {"median": round(median, 1), "p99": round(p99, 1)}


def _times(times: dict[str, float]) -> str:
    return f"{times['median']:,.0f} us median, {times['p99']:,.0f} us p99, on the host"
