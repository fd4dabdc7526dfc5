"""What the prompts of a trace have in common; it knows no blocks of a cache."""

from __future__ import annotations

from collections.abc import Iterable

from bt_runner.replay.traffic.trace import TraceRequest


def longest_common_beginning(requests: Iterable[TraceRequest]) -> int:
    """Return the tokens of the longest beginning that a prompt shares with an earlier one."""
    seen: dict[tuple[int, int], int] = {}
    longest = 0
    for request in requests:
        place, num_common, is_known = 0, 0, True
        for hash_id in request.hash_ids:
            # a beginning is numbered when it is first seen, after the one before it
            key = (place, hash_id)
            is_known = is_known and key in seen
            num_common += is_known
            place = seen.setdefault(key, len(seen) + 1)
        longest = max(longest, min(num_common * request.hash_tokens, request.prompt_len))
    return longest
