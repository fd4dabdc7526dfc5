"""What guesses tokens ahead."""

import pytest

from bt_runner.drafters import NGramDrafter


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        pytest.param([1, 2, 3, 9, 1, 2, 3], [9, 1], id="longest-match"),
        pytest.param([1, 2, 7, 5, 2], [7, 5], id="shorter-match"),
        pytest.param([2, 8, 2, 9, 2], [9, 2], id="latest-match"),
        pytest.param([1, 2, 3], [], id="no-match"),
        pytest.param([4], [], id="one-token"),
        pytest.param([5, 5], [5], id="match-at-the-end"),
    ],
)
def test_it_proposes_what_followed_before(tokens: list[int], drafts: list[int]) -> None:
    """The latest place of the longest match decides."""
    assert NGramDrafter(longest=3).propose(tokens, 2) == drafts


def test_it_looks_no_further_back_than_its_reach() -> None:
    """The cost of a look-up does not grow with the text."""
    tokens = [1, 2, *range(10, 30), 1]
    assert NGramDrafter().propose(tokens, 1) == [2]
    assert NGramDrafter(reach=5).propose(tokens, 1) == []
