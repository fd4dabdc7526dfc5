"""Writes a run as one HTML file that needs no network: Vega-Lite's charts and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

import numpy as np

from bt_runner.errors import BadInputError
from bt_runner.report.charts import charts_of
from bt_runner.report.series import StepSeries

_VEGA_LITE = "6.4"

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --soft: #9ea7b3;
  --line: #3d444d } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left;
  vertical-align: top } th { color: var(--soft); font-weight: normal }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto; overflow-wrap: normal } .chart { width: 100%; min-height: 220px }
.note { color: var(--soft); font-size: .9rem }
@media (max-width: 40rem) { .wide { font-size: .8rem } .wide td { padding-right: .4rem } }
"""

# in braces of its own, so that no name of it meets one of the libraries'
_SCRIPT = """
{
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 40rem)");
const draw = () => {
  const ink = dark.matches ? "#e6edf3" : "#1b1f24", line = dark.matches ? "#3d444d" : "#d0d7de";
  const range = dark.matches
    ? ["#6cb6ff", "#f69d50", "#8ddb8c", "#dcbdfb", "#f47067", "#39c5cf", "#eac54f", "#ff9bce",
       "#8b949e", "#b08800"]
    : ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#0b7285", "#9a6700", "#bf3989",
       "#57606a", "#4d2d00"];
  const config = { background: "transparent", view: { stroke: null }, rule: { color: ink },
    axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line },
    legend: { labelColor: ink, titleColor: ink, columns: narrow.matches ? 3 : 0 },
    range: { category: range } };
  return Promise.all(charts.map((chart, number) => vegaEmbed("#chart" + number, chart,
    { actions: false, renderer: "svg", config,
      tooltip: { theme: dark.matches ? "dark" : "light" } })));
};
window.drawn = draw();
for (const query of [dark, narrow]) query.addEventListener("change", draw);
}
"""


def write_report(
    path: Path, title: str, summary: Mapping[str, str], record: object, series: StepSeries
) -> None:
    """Write a run as a page.

    Args:
        path: The file.
        title: What was run.
        summary: The figures as a person reads them, by name.
        record: The figures as ``--json`` prints them; the page carries them in an element
            called ``record``.
        series: The numbers of each step, at least one.

    Raises:
        BadInputError: The extra ``bt-runner[report]`` is not installed, the run has no step, or
            the file cannot be written.
    """
    if not series.num_steps:
        raise BadInputError("there is no step to report", path=str(path))
    page = render(title, summary, record, series, script=_vega_embed())
    try:
        path.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadInputError(f"cannot write {path}: {error}", path=str(path)) from error


def require_report_library() -> None:
    """Refuse before a long run what would fail at its end.

    Raises:
        BadInputError: The extra ``bt-runner[report]`` is not installed.
    """
    try:
        import vl_convert  # noqa: F401
    except ImportError:
        raise BadInputError(
            "--report needs vl-convert-python: install bt-runner[report]", extra="report"
        ) from None


def render(
    title: str, summary: Mapping[str, str], record: object, series: StepSeries, *, script: str
) -> str:
    """Return the page; no string of the arguments can become markup.

    Args:
        title: What was run.
        summary: The figures as a person reads them, by name.
        record: The figures as ``--json`` prints them.
        series: The numbers of each step.
        script: Vega, Vega-Lite and Vega-Embed.
    """
    charts = charts_of(series)
    body = [f"<h1>{escape(title)}</h1>", "<h2>Summary</h2>", _table(summary)]
    for number, heading in enumerate(charts):
        body.append(f'<h2>{escape(heading)}</h2><div class="chart" id="chart{number}"></div>')
    body += ["<h2>Host time of a step, its tail</h2>", _tail(series)]
    body.append(
        '<p class="note">Long curves are thinned: each stretch keeps its minimum and its '
        "maximum.</p>"
    )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            f'<script type="application/json" id="record">{_json(record)}</script>',
            f'<script type="application/json" id="charts">{_json(list(charts.values()))}</script>',
            f"<script>{script.replace('</script', '<' + chr(92) + '/script')}</script>",
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def _json(value: object) -> str:
    """Return JSON that cannot end the element which holds it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _table(summary: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in summary.items()
    )
    return f'<table id="summary">{rows}</table>'


def _tail(series: StepSeries) -> str:
    """Return the percentiles of each phase and of whole steps, in milliseconds."""
    heads = ("median", "p90", "p99", "p99.9", "longest")
    times = {name: series.phase_seconds[:, p] for p, name in enumerate(series.phases)}
    times["all of it"] = series.phase_seconds.sum(axis=1)
    rows = ["<tr><th>ms</th>" + "".join(f'<td class="n">{head}</td>' for head in heads) + "</tr>"]
    for name, seconds in times.items():
        cells = np.percentile(seconds * 1e3, (50, 90, 99, 99.9, 100))
        texts = "".join(f'<td class="n">{cell:,.3f}</td>' for cell in cells)
        rows.append(f"<tr><th>{escape(name)}</th>{texts}</tr>")
    return f'<div class="wide"><table id="tail">{"".join(rows)}</table></div>'


def _vega_embed() -> str:
    require_report_library()
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", _VEGA_LITE))
