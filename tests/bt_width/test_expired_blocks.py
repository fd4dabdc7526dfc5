"""Blocks at the start of a row that no later step reads."""

from typing import Any

import pytest
from tests.support.kinds import ALIGN, EVERY_KIND
from tests.support.plans import plan

from bt_width import (
    AttentionSpec,
    CacheSpec,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("spec", "num_computed", "expired"),
    [
        pytest.param(
            SlidingWindowSpec(block_size=32, window=128), 256, 4, id="window-of-four-blocks"
        ),
        pytest.param(
            SlidingWindowSpec(block_size=16, window=128), 256, 8, id="window-of-eight-blocks"
        ),
        pytest.param(SlidingWindowSpec(block_size=16, window=128), 127, 0, id="window-not-full"),
        pytest.param(SlidingWindowSpec(block_size=16, window=128), 142, 0, id="block-still-seen"),
        pytest.param(SlidingWindowSpec(block_size=16, window=128), 143, 1, id="block-just-left"),
        pytest.param(
            SlidingWindowSpec(block_size=16, window=128, extra_retained_tokens=1), 143, 0, id="kept"
        ),
        pytest.param(SlidingWindowSpec(block_size=16, window=128), 0, 0, id="nothing-computed"),
        pytest.param(MambaSpec(block_size=640, mode="align"), 1280, 1, id="align-full-block"),
        pytest.param(MambaSpec(block_size=640, mode="align"), 1281, 2, id="align-next-block"),
        pytest.param(MambaSpec(block_size=640), 1281, 0, id="one-state"),
        pytest.param(AttentionSpec(block_size=16), 900, 0, id="attention-reads-all"),
        pytest.param(RingSpec(block_size=16), 900, 0, id="ring"),
    ],
)
def test_leading_blocks_expire(spec: CacheSpec, num_computed: int, expired: int) -> None:
    assert plan(spec, 2000).num_expired_blocks(num_computed) == expired


def test_what_stays_is_what_admission_reserved() -> None:
    """The blocks between the expired ones and the step's end fit what was reserved."""
    layout = plan(SlidingWindowSpec(block_size=4, window=6, extra_retained_tokens=1), 400)

    for num_computed in range(300):
        for in_flight in range(1, 20):
            held = layout.num_blocks(num_computed + in_flight)
            live = held - layout.num_expired_blocks(num_computed)

            assert live <= layout.max_resident_blocks(in_flight)


def test_a_block_expires_when_its_last_token_is_behind_the_window() -> None:
    """Against a walk over every token that a later query sees."""
    for window, retained in ((1, 0), (2, 0), (9, 0), (9, 5), (64, 1)):
        spec = SlidingWindowSpec(block_size=4, window=window, extra_retained_tokens=retained)
        layout = plan(spec, 100)
        for computed in range(101):
            first_seen = next(
                position
                for position in range(computed + 1)
                if position + window - 1 + retained >= computed
            )

            assert layout.num_expired_blocks(computed) == first_seen // 4


@pytest.mark.parametrize(("computed", "expired"), [(0, 0), (1, 0), (64, 0), (65, 1), (128, 1)])
def test_the_states_before_the_last_expire(computed: int, expired: int) -> None:
    """The next step reads the state of the last computed token, and none before."""
    layout = plan(ALIGN, 1000)

    assert layout.num_expired_blocks(computed) == expired == layout.state_column(computed)


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize("spec", EVERY_KIND)
def test_computed_tokens_are_a_count(spec: CacheSpec, bad: Any) -> None:
    layout = plan(spec, 2000)

    with pytest.raises(InvalidSpecError, match="num_computed_tokens"):
        layout.num_expired_blocks(bad)
