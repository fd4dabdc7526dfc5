"""How far a check looks, and no less: to the end of a line, and to a window's first block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.support.sanitizer_edges import NUM_BLOCKS, decode_step, long_rows, short_window

from bt_tables.sanitizer.detector import Detector, ReferenceDetector
from bt_tables.sanitizer.kernel import KernelDetector
from bt_tables.sanitizer.step import CacheGroup, CheckedStep
from bt_width import BlockTableLayout

pytestmark = pytest.mark.fast

MakeDetector = Callable[[Sequence[CacheGroup], int, torch.device], Detector]
DETECTORS = [
    pytest.param(ReferenceDetector, id="reference"),
    pytest.param(KernelDetector, id="kernel"),
]


def make(detector: MakeDetector, layout: BlockTableLayout) -> Detector:
    groups = [CacheGroup(layout.addressing, NUM_BLOCKS)]
    return detector(groups, 1, torch.device("cpu"))


def is_sound(detector: Detector, step: CheckedStep) -> bool:
    """Whether nothing is found; a kernel that runs on the CPU answers by its flags."""
    if isinstance(detector, KernelDetector):
        return not detector.detect(step).any()
    return not detector.find(step)


@pytest.mark.parametrize("make_detector", DETECTORS)
@pytest.mark.parametrize(
    ("num_columns", "end"), [(1, 32), (31, 32), (32, 64), (33, 64), (64, 96)], ids=str
)
def test_a_known_row_is_read_to_the_end_of_its_line(
    make_detector: MakeDetector, num_columns: int, end: int
) -> None:
    """A column past the row is found in any place of the line of 32 in which the row ends."""
    layout = long_rows()
    detector = make(make_detector, layout)
    for stale in sorted({num_columns, min(num_columns + 1, end - 1), end - 1}):
        detector.forget()
        assert is_sound(detector, decode_step(layout, 4 * num_columns))

        assert not is_sound(detector, decode_step(layout, 4 * num_columns, stale=stale))


@pytest.mark.parametrize("make_detector", DETECTORS)
@pytest.mark.parametrize("window", [2, 5, 6, 9])
@pytest.mark.parametrize("extra", [0, 3])
def test_the_first_block_of_a_window_must_be_there(
    make_detector: MakeDetector, window: int, extra: int
) -> None:
    """At every offset in a block: those behind it may be null, and it may not."""
    layout = short_window(window, extra)
    detector = make(make_detector, layout)
    # an interpreted kernel is slow; steps of 3 come to every offset in blocks of 4
    for length in range(2, 40, 3 if make_detector is KernelDetector else 1):
        first_visible = max(length - 1 - (window - 1) - extra, 0)
        num_behind = first_visible // 4

        detector.forget()
        sound = is_sound(detector, decode_step(layout, length, num_null=num_behind))
        detector.forget()
        short = is_sound(detector, decode_step(layout, length, num_null=num_behind + 1))

        assert (sound, short) == (True, False), length
