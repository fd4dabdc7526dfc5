"""The page of a run in a real browser: it draws, loads nothing, and can be read.

Chromium opens a page that frames the report; a script that only the test adds measures it.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.series import random_series
from tests.support.speed import slowness

pytest.importorskip("vl_convert", reason="needs bt-runner[report]")

from bt_runner.report.charts import charts_of
from bt_runner.report.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: CONTRIBUTING.md says how to install one"
)

SUMMARY = {"requests": "200 ended, 0 refused", "blocks of mla": "580 at peak, of 592"}
RECORD = {"num_requests": 200, "groups": [{"name": "mla", "peak_blocks": 580}]}

WATCH = """<script>
window.faults = [];
addEventListener("error", event => faults.push(String(event.message)));
addEventListener("unhandledrejection", event => faults.push(String(event.reason)));
for (const kind of ["error", "warn"]) console[kind] = (...words) => faults.push(words.join(" "));
</script>"""
MEASURE = """<script>{
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = text => { const c = document.createElement("canvas").getContext("2d");
  c.fillStyle = text; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
const light = text => { const [r, g, b] = color(text).slice(0, 3).map(v => { v /= 255;
  return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05); };
drawn.then(() => {
  const back = getComputedStyle(document.body).backgroundColor;
  const inks = [...document.querySelectorAll("h1, h2, th, td, p")]
    .map(node => getComputedStyle(node).color);
  const labels = [...document.querySelectorAll("svg text")].map(node => node.getAttribute("fill"));
  parent.postMessage(JSON.stringify({
    faults, back, dark: dark.matches,
    loaded: performance.getEntriesByType("resource").map(entry => entry.name)
      .filter(name => !name.startsWith("data:")),
    marks: [...document.querySelectorAll(".chart")].map(node =>
      node.querySelectorAll(".role-mark path[d]").length),
    cut: [...document.querySelectorAll("svg text")].filter(node => {
      const text = node.getBoundingClientRect(), page = node.closest("svg").getBoundingClientRect();
      return text.left < page.left - 1 || text.right > page.right + 1; })
      .map(node => node.textContent),
    numbers: [...document.querySelectorAll(".role-axis-label text")]
      .map(node => node.textContent),
    areas: [...document.querySelectorAll(".mark-area path")].map(node => node.getAttribute("fill")),
    overflow: document.documentElement.scrollWidth - innerWidth, width: innerWidth,
    contrast: Math.min(...[...inks, ...labels.filter(Boolean)].map(ink => contrast(ink, back))),
    summary: Object.fromEntries([...document.querySelectorAll("#summary tr")]
      .map(row => [row.cells[0].textContent, row.cells[1].textContent])),
    record: document.getElementById("record").textContent,
  }), "*");
}, error => parent.postMessage(JSON.stringify({ faults: [String(error)] }), "*"));
}</script>"""
FRAME = """<!doctype html><body style="margin:0">
<iframe style="border:0;width:{width}px;height:900px" src="page.html"></iframe>
<pre id="seen"></pre><script>
addEventListener("message", event => document.getElementById("seen").textContent = event.data);
</script>"""


def look(
    folder: Path, num_steps: int, width: int, *, dark: bool, times: list[float] | None = None
) -> dict[str, Any]:
    """What the browser sees of a report in a frame of some width; ``times`` gets its seconds."""
    path = folder / "page.html"
    write_report(path, "a run of <b>mla</b>", SUMMARY, RECORD, random_series(num_steps))
    text = path.read_text(encoding="utf-8")
    assert len(text) < 3_000_000
    text = text.replace("<head>", f"<head>{WATCH}", 1)
    # the last one: the libraries' own texts hold such words, too
    body, _, end = text.rpartition("</body>")
    path.write_text(f"{body}{MEASURE}</body>{end}", encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    before = os.times()
    done = subprocess.run(
        [
            *[str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"],
            *["--virtual-time-budget=20000", "--window-size=1700,1000"],
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={folder / 'profile'}",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if times is not None:
        after = os.times()
        used = after.children_user - before.children_user
        times.append(used + after.children_system - before.children_system)
    found = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


@pytest.fixture(
    scope="module",
    params=[(400, False), (1600, False), (400, True), (1600, True)],
    ids=["phone", "screen", "phone-dark", "screen-dark"],
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    width, dark = request.param
    found = look(tmp_path_factory.mktemp("page"), 300, width, dark=dark)
    assert found["width"] == width
    assert found["dark"] is dark
    return found


def test_it_draws_without_an_error_and_loads_nothing(seen: dict[str, Any]) -> None:
    assert seen["faults"] == []
    assert seen["loaded"] == []


def test_every_chart_has_marks(seen: dict[str, Any]) -> None:
    assert len(seen["marks"]) == len(charts_of(random_series(3)))
    assert min(seen["marks"]) >= 1


def test_no_text_overflows(seen: dict[str, Any]) -> None:
    assert seen["overflow"] <= 0
    assert seen["cut"] == []


def test_axes_show_whole_numbers_and_percent(seen: dict[str, Any]) -> None:
    assert len(seen["numbers"]) > 50
    assert [text for text in seen["numbers"] if not re.fullmatch(r"[\d,.]+%?", text)] == []


def test_every_phase_has_a_colour_of_its_own(seen: dict[str, Any]) -> None:
    assert len(set(seen["areas"])) == len(seen["areas"]) == len(random_series(3).phases)


def test_every_text_can_be_read(seen: dict[str, Any]) -> None:
    """WCAG's 4.5 for texts."""
    assert seen["contrast"] >= 4.5


def test_the_numbers_are_those_of_the_summary(seen: dict[str, Any]) -> None:
    assert seen["summary"] == SUMMARY
    assert json.loads(seen["record"]) == RECORD


def test_twenty_thousand_steps_draw_in_two_seconds(tmp_path: Path) -> None:
    """Of processor time, beyond what the browser takes for a run of one step; the best of three."""
    times: dict[int, list[float]] = {1: [], 20_000: []}
    for attempt in range(3):
        for num_steps, took in times.items():
            folder = tmp_path / f"{num_steps} {attempt}"
            folder.mkdir()
            assert look(folder, num_steps, 1600, dark=False, times=took)["faults"] == []
        if min(times[20_000]) - min(times[1]) < 2 * slowness():
            return

    pytest.fail(f"processor time by steps: {times}")
