"""Draws one request's rows to scale, as SVG: tokens, blocks, kernel blocks and slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from html import escape
from typing import NamedTuple

from .layout import BlockTableLayout

_LEFT, _RIGHT, _SPAN = 152, 12, 560
_LANE, _GAP = 22, 7
_SMALLEST_CELL = 3.0
_CHARACTER = 6.7
_RANK_CLASSES = 6

_LEGEND = {
    "r0": "in use",
    "r1": "in use, a colour for each rank",
    "null": "null, no longer read",
    "gone": "no slot",
    "look": "lookahead and drafts",
    "pad": "alignment",
}

_STYLE = """
text { font: 12px ui-monospace, monospace; fill: var(--ink) }
.name { font: bold 15px system-ui, sans-serif }
.about { font: 12.5px system-ui, sans-serif; fill: var(--soft) }
rect { stroke: var(--paper); stroke-width: 1 }
.paper { fill: var(--paper); stroke: none }
.null { fill: var(--null) }
.look { fill: var(--look) }
.pad { fill: url(#hatch); stroke: var(--line) }
.gone { fill: none; stroke: var(--line); stroke-dasharray: 2 2 }
.r0 { fill: var(--r0) } .r1 { fill: var(--r1) } .r2 { fill: var(--r2) }
.r3 { fill: var(--r3) } .r4 { fill: var(--r4) } .r5 { fill: var(--r5) }
svg { --paper: #ffffff; --ink: #1f2328; --soft: #57606a; --line: #8c959f; --null: #c8cdd3;
  --look: #e7dcc0; --r0: #a9cbf5; --r1: #f6c79b; --r2: #b3dfb0; --r3: #e3b8e8; --r4: #f2b3b3;
  --r5: #a8dfe0 }
@media (prefers-color-scheme: dark) { svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9aa4af;
  --line: #6e7781; --null: #3d444d; --look: #5a4d2b; --r0: #1f4f87; --r1: #84501f; --r2: #2c6029;
  --r3: #69356f; --r4: #7d3333; --r5: #1f6365 } }
"""


class _Part(NamedTuple):
    """Cells of one look.

    Attributes:
        first: The first cell.
        end: The one after the last.
        look: Their class in the style.
        about: What a pointer that rests on them is told.
    """

    first: int
    end: int
    look: str
    about: str


def draw_rows(groups: Sequence[tuple[str, BlockTableLayout]]) -> str:
    """Return an SVG picture of the rows of a request as long as ``max_model_len``.

    All groups share one scale, in tokens. Columns of a window that no step reads any more are
    grey, as are states that are no longer needed; what only rounds a row up is hatched; ranks
    that share a request's tokens have a colour each. Cells too small to be seen are drawn as
    one.

    Args:
        groups: The name and the layout of each group.
    """
    spans = [_row_tokens(layout) for _, layout in groups if layout.slot_mode == "block"]
    scale = _SPAN / max([*spans, *(layout.limits.max_tokens for _, layout in groups)])
    y, parts = 14.0, []
    looks: set[str] = set()
    for name, layout in groups:
        panel = _Panel(layout, scale, y)
        panel.draw(name)
        parts += panel.parts
        looks |= panel.looks
        y = panel.y + 14
    width = _LEFT + _SPAN + _RIGHT
    legend, y = _legend(looks, y, width)
    parts += legend
    height = round(y + 18)
    names = ", ".join(name for name, _ in groups)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n'
        f"<title>{escape(f'Rows of one request: {names}')}</title>\n<style>{_STYLE}</style>\n"
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="paper" width="6" height="6"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#8c959f" stroke-width="2"/></pattern></defs>\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _legend(looks: Set[str], y: float, width: int) -> tuple[list[str], float]:
    """Return what explains the looks that are drawn, and where its last line stands."""
    shown = set(looks)
    if "r1" in shown:
        shown.remove("r0")
    parts, x = [], float(_LEFT)
    for look, words in _LEGEND.items():
        if look not in shown:
            continue
        room = 40 + 7 * len(words)
        if x + room > width:
            x, y = float(_LEFT), y + 20
        # ranks are explained with the colour of the first
        drawn = "r0" if look == "r1" else look
        parts.append(f'<rect class="{drawn}" x="{x:.0f}" y="{y - 4:.0f}" width="12" height="12"/>')
        parts.append(f'<text class="about" x="{x + 18:.0f}" y="{y + 6.5:.0f}">{words}</text>')
        x += room
    return parts, y


def _row_tokens(layout: BlockTableLayout) -> int:
    """Return the tokens of a request that a whole row spans, its alignment included."""
    return layout.addressing.blocks_per_row * layout.tokens_per_block


class _Panel:
    """One group's lanes, from the top down."""

    def __init__(self, layout: BlockTableLayout, scale: float, y: float) -> None:
        self.parts: list[str] = []
        self.looks: set[str] = set()
        self.y = y
        self._layout = layout
        self._scale = scale

    def draw(self, name: str) -> None:
        layout = self._layout
        self._heading(name)
        match layout.slot_mode:
            case "block":
                self._draw_blocks()
            case "ring":
                self._draw_ring()
            case _:
                self._draw_states()

    def _heading(self, name: str) -> None:
        layout = self._layout
        about = (
            f"{_count(layout.limits.max_tokens, 'token')}, {_count(layout.max_num_blocks, 'block')}"
        )
        about += f" of {layout.block_size:,}"
        if layout.shards > 1:
            about += f" on each of {layout.shards} ranks"
        if layout.kernel_blocks_per_block > 1:
            about += f", each {layout.kernel_blocks_per_block} kernel blocks"
        self._text(_LEFT, self.y + 3, name, "name", "start")
        self._text(
            _LEFT, self.y + 21, f"{about}: {_count(layout.width, 'column')}", "about", "start"
        )
        self.y += 31

    def _draw_blocks(self) -> None:
        layout = self._layout
        ranks = range(layout.shards) if layout.shards > 1 else range(1)
        self._lane("tokens", 1, self._token_parts())
        for rank in ranks:
            label = f"blocks, rank {rank}" if layout.shards > 1 else "blocks"
            self._lane(label, layout.tokens_per_block, self._block_parts(1, rank))
        own = layout.addressing.rank
        split = layout.kernel_blocks_per_block
        which = f", rank {own}" if layout.shards > 1 else ""
        self._lane(
            f"kernel blocks{which}", layout.tokens_per_block / split, self._block_parts(split, own)
        )
        self._lane("slots" + which, layout.shards, list(self._slot_parts(own)))

    def _draw_ring(self) -> None:
        """One block, which all tokens share in turn."""
        size = self._layout.block_size
        self._lane("tokens", 1, self._token_parts())
        self._lane("the block", size, [_Part(0, 1, "r0", "position % block size is the slot")])
        self._lane("slots", 1, [_Part(0, size, "r0", f"{size:,} slots, written in turn")])

    def _draw_states(self) -> None:
        """A state at each block's end, or one that is written on and on."""
        layout = self._layout
        self._lane("tokens", 1, self._token_parts())
        gone = layout.num_expired_blocks(layout.limits.max_model_len)
        drafts = layout.addressing.states_per_step - 1
        first_draft = layout.max_num_blocks - drafts
        self._lane(
            "states",
            layout.block_size,
            [
                _Part(0, gone, "null", "states of earlier tokens, no longer read"),
                _Part(gone, first_draft, "r0", "the state that steps read and write"),
                _Part(first_draft, layout.max_num_blocks, "look", "states of drafts"),
            ],
        )

    def _token_parts(self) -> list[_Part]:
        layout = self._layout
        limits, addressing = layout.limits, layout.addressing
        longest, end = limits.max_model_len, limits.max_tokens
        ahead = _Part(longest, end, "look", "lookahead: tokens that a step may address")
        unseen = max(longest - addressing.visible_tokens, 0) if addressing.advances else 0
        if layout.shards == 1:
            return [
                _Part(0, unseen, "null", "tokens that the last step does not read"),
                _Part(unseen, longest, "r0", "tokens"),
                ahead,
            ]
        runs = -(-longest // addressing.interleave)
        if addressing.interleave * self._scale < _SMALLEST_CELL:
            return [_Part(0, longest, "r0", "tokens, which go to the ranks in turn"), ahead]
        return [
            *(
                _Part(
                    run * addressing.interleave,
                    min((run + 1) * addressing.interleave, longest),
                    _look(run % layout.shards),
                    f"tokens of rank {run % layout.shards}",
                )
                for run in range(runs)
            ),
            ahead,
        ]

    def _block_parts(self, split: int, rank: int) -> list[_Part]:
        """Return what blocks are, each cut into ``split`` columns."""
        layout = self._layout
        used = layout.max_num_blocks
        gone = min(layout.num_expired_blocks(layout.limits.max_model_len), used)
        room = layout.addressing.blocks_per_row
        return [
            _Part(0, gone * split, "null", "null: given back, as no later step reads it"),
            _Part(gone * split, used * split, _look(rank), "held by the longest request"),
            _Part(used * split, room * split, "pad", "alignment: never used by a request"),
        ]

    def _slot_parts(self, rank: int) -> Iterator[_Part]:
        """Return the slots of a row: one a token of this rank, none where a column is null."""
        layout = self._layout
        gone = layout.num_expired_blocks(layout.limits.max_model_len) * layout.block_size
        end = layout.local_length(layout.limits.max_tokens, rank if layout.shards > 1 else None)
        yield _Part(0, gone, "gone", "no slot: the column is null")
        yield _Part(gone, end, _look(rank), "a slot: kernel block id x its size + offset")

    def _lane(self, label: str, cell_tokens: float, parts: Sequence[_Part]) -> None:
        self._text(_LEFT - 8, self.y + _LANE / 2 + 4, label, "about", "end")
        size = cell_tokens * self._scale
        parts = [part for part in parts if part.end > part.first]
        # numbers in every cell, or in none
        longest = max((len(str(part.end - 1)) for part in parts), default=0)
        has_numbers = longest * _CHARACTER + 2 <= size
        for part in parts:
            self.looks.add(part.look)
            if size < _SMALLEST_CELL:
                self._cell(part.first, part.end, size, part)
                continue
            for cell in range(part.first, part.end):
                self._cell(cell, cell + 1, size, part, has_number=has_numbers)
        self.y += _LANE + _GAP

    def _cell(
        self, first: int, end: int, size: float, part: _Part, *, has_number: bool = False
    ) -> None:
        x, width = _LEFT + first * size, (end - first) * size
        span = f"{first:,}" if end == first + 1 else f"{first:,} to {end - 1:,}"
        self.parts.append(
            f'<rect class="{part.look}" x="{x:.2f}" y="{self.y:.1f}" width="{width:.2f}" '
            f'height="{_LANE}"><title>{escape(f"{span}: {part.about}")}</title></rect>'
        )
        if has_number and part.look != "pad":
            self._text(x + width / 2, self.y + _LANE / 2 + 4, str(first), "", "middle")

    def _text(self, x: float, y: float, text: str, look: str, anchor: str) -> None:
        kind = f' class="{look}"' if look else ""
        self.parts.append(
            f'<text{kind} x="{x:.2f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _look(rank: int) -> str:
    return f"r{rank % _RANK_CLASSES}"
