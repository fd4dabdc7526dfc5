"""Attention to cached latents, and its merging."""

import pytest
import torch

from bt_runner.models.layers.mla import attend
from bt_runner.models.sharding import PartialAttention, merge

B, Q, H, S, R, D = 2, 3, 2, 7, 4, 6


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(B, Q, H, D, generator=draw, dtype=torch.float64)
    rows = torch.randn(B, S, D, generator=draw, dtype=torch.float64)
    visible = torch.rand(B, Q, S, generator=draw) < 0.6
    visible[..., 0] = True
    return query, rows, visible


def _attend(query: torch.Tensor, rows: torch.Tensor, visible: torch.Tensor) -> PartialAttention:
    return attend(query, rows, visible, latent_dim=R, scale=0.5)


def test_it_is_a_softmax_over_what_is_visible() -> None:
    """Token by token, head by head."""
    query, rows, visible = _inputs()
    values = _attend(query, rows, visible).values
    for b in range(B):
        for q in range(Q):
            seen = rows[b, visible[b, q]]
            for h in range(H):
                shares = torch.softmax(seen @ query[b, q, h] * 0.5, dim=0)
                torch.testing.assert_close(values[b, q, h], shares @ seen[:, :R])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_visible_may_hold_anything(poison: float) -> None:
    """A block that was never written does not reach the result."""
    query, rows, visible = _inputs()
    visible[:, :, 4] = False
    wanted = _attend(query, rows, visible)
    rows[:, 4] = poison
    found = _attend(query, rows, visible)
    assert torch.equal(found.values, wanted.values)


def test_nothing_visible_gives_zero_and_no_weight() -> None:
    """A rank that owns no selected token counts for nothing; it is not NaN."""
    query, rows, visible = _inputs()
    visible[0] = False
    found = _attend(query, rows, visible)
    assert (found.values[0] == 0).all()
    assert (found.log_weight[0] == -torch.inf).all()


def test_parts_merge_to_the_whole() -> None:
    """Also where a part sees nothing, or none does."""
    query, rows, visible = _inputs()
    visible[0, 0] = False
    parts = [
        _attend(query, rows[:, span], visible[..., span])
        for span in (slice(0, 2), slice(2, 3), slice(3, 7))
    ]
    nothing = torch.zeros(B, Q, 2, dtype=torch.bool)
    parts.append(_attend(query, rows[:, :2], nothing))
    whole = _attend(query, rows, visible)
    merged = merge(parts)
    torch.testing.assert_close(merged.values, whole.values)
    torch.testing.assert_close(merged.log_weight, whole.log_weight)
