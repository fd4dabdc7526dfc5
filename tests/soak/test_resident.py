"""Growth is that of a warm process: what was allocated to get going does not count."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.soak import resident
from tests.soak.resident import ResidentMemory, resident_bytes


def _memory(monkeypatch: pytest.MonkeyPatch, samples: Iterable[int]) -> ResidentMemory:
    memory = ResidentMemory()
    for sample in samples:
        monkeypatch.setattr(resident, "resident_bytes", lambda sample=sample: sample)
        memory.sample()
    return memory


def test_a_level_process_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _memory(monkeypatch, [50, 90, *[100] * 6])

    assert memory.growth_percent == 0.0
    assert memory.last == 100


def test_a_leak_is_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _memory(monkeypatch, range(1000, 1160, 20))

    assert memory.growth_percent == pytest.approx(100 * (1140 / 1040 - 1), abs=1.0)


def test_one_sample_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _memory(monkeypatch, [100]).growth_percent == 0.0


def test_the_resident_memory_is_that_of_this_process() -> None:
    before = resident_bytes()
    # every byte is written, so that the pages are there
    kept = bytearray(b"x") * (64 << 20)

    assert resident_bytes() - before > len(kept) // 2
