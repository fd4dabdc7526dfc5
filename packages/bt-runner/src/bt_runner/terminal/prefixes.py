"""Says on standard error why a model's requests share nothing of their beginnings."""

from __future__ import annotations

from bt_runner.prefix_cache import PrefixCache
from bt_width.terminal import print_line


def tell_why_nothing_is_shared(prefixes: PrefixCache) -> None:
    """Print a line where no prefix can be cached, whatever the requests are."""
    if prefixes.reason_for_none is not None:
        print_line(f"no prefix is cached: {prefixes.reason_for_none}")
