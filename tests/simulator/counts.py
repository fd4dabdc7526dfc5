"""What a soak has seen so far, and how that reads."""

from __future__ import annotations

from dataclasses import dataclass

from bt_runner.scheduler import SchedulerOutput


@dataclass(slots=True, eq=False)
class Counts:
    """Counted over all scenarios.

    Attributes:
        num_scenarios: Scenarios begun.
        num_steps: Steps.
        num_tokens: Tokens of them.
        num_drafts: Drafts among those.
        num_ended: Requests that ran to their end.
        num_aborted: Requests that were taken out.
        num_preemptions: Times a request gave up its blocks for others.
        num_hit_tokens: Tokens that requests were spared by blocks of others.
        num_rehit_tokens: Tokens that preempted requests were spared when they came back.
        num_padded_steps: Steps with padding rows.
        num_dummy_steps: Steps without requests.
        num_broken_steps: Steps that failed in the middle.
        num_checks: Checks by the sanitizer: one a step, rank and table class.
        num_oracle_steps: Steps whose every column and slot was derived again.
        num_findings: Things that were not as they should be.
        num_lost_blocks: Blocks that were not in their pool when no request was left.
    """

    num_scenarios: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_ended: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_rehit_tokens: int = 0
    num_padded_steps: int = 0
    num_dummy_steps: int = 0
    num_broken_steps: int = 0
    num_checks: int = 0
    num_oracle_steps: int = 0
    num_findings: int = 0
    num_lost_blocks: int = 0

    def note_step(self, batch: SchedulerOutput, *, is_padded: bool) -> None:
        """Count a step that was checked."""
        self.num_steps += 1
        self.num_tokens += int(batch.num_tokens.sum())
        self.num_drafts += int(batch.num_drafts.sum())
        self.num_padded_steps += is_padded

    def to_line(self) -> str:
        """Return the figures that move, on one line."""
        return (
            f"scenarios {self.num_scenarios:,}  steps {self.num_steps:,}  "
            f"requests {self.num_ended:,}  preemptions {self.num_preemptions:,}  "
            f"checks {self.num_checks:,}  findings {self.num_findings}"
        )

    def to_text(self) -> str:
        """Return all figures."""
        return "\n".join(
            (
                f"scenarios    {self.num_scenarios:,}",
                f"steps        {self.num_steps:,}, {self.num_padded_steps:,} of them padded; "
                f"{self.num_dummy_steps:,} dummy, {self.num_broken_steps:,} broken off",
                f"tokens       {self.num_tokens:,}, {self.num_drafts:,} of them drafts",
                f"requests     {self.num_ended:,} ended, {self.num_aborted:,} aborted, "
                f"{self.num_preemptions:,} preemptions",
                f"cached       {self.num_hit_tokens:,} tokens by other requests, "
                f"{self.num_rehit_tokens:,} before a preemption",
                f"checks       {self.num_checks:,} by the sanitizer, "
                f"{self.num_oracle_steps:,} steps by the contract",
            )
        )
