"""The charts of a run as Vega-Lite specs: one curve a chart or a few, with units and hover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bt_runner.report.series import StepSeries, thinned

Chart = dict[str, Any]


def charts_of(series: StepSeries) -> dict[str, Chart]:
    """Return the charts of a run by their headings."""
    return {
        **{
            f"Blocks of {name} in use": _blocks_chart(series, group)
            for group, name in enumerate(series.groups)
        },
        "Requests": _lines({"running": series.running, "waiting": series.waiting}, "requests", "d"),
        "Share of prompt tokens found in the cache": _lines(
            {"hits so far": series.hit_share}, "share of prompt tokens", ".1%"
        ),
        "Bytes sent to the device": _lines({"bytes": series.bytes_sent}, "bytes per step", ",d"),
        "Host time of a step": _time_chart(series),
    }


def _blocks_chart(series: StepSeries, group: int) -> Chart:
    """Draw blocks in use below the pool's size, with a mark where requests were preempted."""
    used = series.used_blocks[:, group]
    chart = _lines({"in use": used}, "blocks", ",d")
    size = series.pool_blocks[group]
    chart["layer"].append(
        {
            "data": {"values": [{"size": size, "about": f"pool: {size:,} blocks"}]},
            "mark": {"type": "rule", "strokeDash": [6, 4], "size": 1.5},
            "encoding": {
                "y": {"field": "size", "type": "quantitative"},
                "tooltip": [{"field": "about", "type": "nominal", "title": "pool"}],
            },
        }
    )
    steps = series.preemptions
    if len(steps):
        shown = steps[np.linspace(0, len(steps) - 1, min(len(steps), 600)).astype(int)]
        marks = [{"step": int(s), "preempted": int(series.preempted[s])} for s in shown]
        chart["layer"].append(
            {
                "data": {"values": marks},
                "mark": {"type": "tick", "color": "#d1242f", "thickness": 1.5, "size": 10},
                "encoding": {
                    "x": {"field": "step", "type": "quantitative"},
                    "y": {"datum": 0},
                    "tooltip": [
                        {"field": "step", "type": "quantitative", "format": ",d"},
                        {"field": "preempted", "type": "quantitative", "title": "preempted"},
                    ],
                },
            }
        )
    return chart


def _time_chart(series: StepSeries) -> Chart:
    """Draw the phases of a step stacked, at the same steps for all."""
    steps = thinned(series.phase_seconds.sum(axis=1))
    values = [
        {"step": step, "name": name, "value": round(float(series.phase_seconds[step, p] * 1e3), 4)}
        for p, name in enumerate(series.phases)
        for step in steps
    ]
    return {
        **_frame(values),
        "mark": {"type": "area", "line": False, "tooltip": True},
        "encoding": {
            "x": _STEP,
            "y": {
                "field": "value",
                "type": "quantitative",
                "stack": "zero",
                "title": "ms per step",
            },
            "color": _color(series.phases),
            "tooltip": _tooltip("ms", ".3f"),
        },
    }


def _lines(
    curves: dict[str, NDArray[np.int64] | NDArray[np.float64]], unit: str, form: str
) -> Chart:
    values = [
        {"step": step, "name": name, "value": curve[step].item()}
        for name, curve in curves.items()
        for step in thinned(curve)
    ]
    nearest = {
        "name": "nearest",
        "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"},
    }
    is_share = "%" in form
    encoding = {
        "x": _STEP,
        "y": {
            "field": "value",
            "type": "quantitative",
            "title": unit,
            "axis": {"format": ".0%"} if is_share else {"format": ",d", "tickMinStep": 1},
            "scale": {"domain": [0, 1]} if is_share else {"zero": True},
        },
        "color": _color(list(curves)),
    }
    return {
        **_frame(values),
        "layer": [
            {"mark": {"type": "line", "interpolate": "step-after"}, "encoding": encoding},
            {
                "params": [nearest],
                "mark": {"type": "point", "filled": True, "size": 50},
                "encoding": {
                    **encoding,
                    "opacity": {
                        "condition": {"param": "nearest", "empty": False, "value": 1},
                        "value": 0,
                    },
                    "tooltip": _tooltip(unit, form),
                },
            },
        ],
    }


_STEP = {"field": "step", "type": "quantitative", "title": "step", "axis": {"tickMinStep": 1}}


def _frame(values: Sequence[dict[str, object]]) -> Chart:
    return {"data": {"values": values}, "width": "container", "height": 220}


def _color(names: Sequence[str]) -> Chart:
    return {
        "field": "name",
        "type": "nominal",
        "sort": list(names),
        "legend": {"orient": "top", "title": None} if len(names) > 1 else None,
    }


def _tooltip(unit: str, form: str) -> list[Chart]:
    return [
        {"field": "name", "type": "nominal", "title": "curve"},
        {"field": "step", "type": "quantitative", "format": ",d"},
        {"field": "value", "type": "quantitative", "title": unit, "format": form},
    ]
