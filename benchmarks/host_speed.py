"""How fast this machine is now: figures of two runs are compared by it."""

import time


def python_speed() -> float:
    """Return the milliseconds of a fixed loop in plain Python, the best of five."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        total = 0
        for number in range(1_000_000):
            total += number & 7
        best = min(best, time.process_time() - began)
    return 1e3 * best
