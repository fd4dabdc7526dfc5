"""A real browser that opens a page: Chromium without a window, where the machine has one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
"""The browser's path, None where there is none."""

_MEASURE = """
<script>
function light(color) {
  const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function backOf(element) {
  for (let at = element; at; at = at.parentElement) {
    const back = getComputedStyle(at).backgroundColor;
    if (back !== 'rgba(0, 0, 0, 0)' && back !== 'transparent') return back;
  }
  return 'rgb(255, 255, 255)';
}
const texts = [...document.body.querySelectorAll('h1, h2, h3, p, li, th, td')];
const contrasts = texts.map(element => {
  const one = light(getComputedStyle(element).color), other = light(backOf(element));
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
});
const measured = {
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  width: window.innerWidth,
  contrast: Math.min(...contrasts),
  back: getComputedStyle(document.body).backgroundColor,
  cells: [...document.querySelectorAll('td')].map(cell => cell.textContent),
  cut: [...document.querySelectorAll('svg text')].filter(node => {
    const text = node.getBoundingClientRect(), box = node.closest('svg').getBoundingClientRect();
    return text.left < box.left || text.right > box.right
      || text.top < box.top || text.bottom > box.bottom;
  }).map(node => node.textContent),
  elements: [...new Set([...document.body.querySelectorAll('*')].map(e => e.localName))],
};
parent.postMessage(JSON.stringify(measured), '*');
</script>
"""

# a window cannot be narrower than 500 pixels, and a frame can
_FRAME = """<!doctype html><script>
addEventListener('message', event => {
  const shown = document.createElement('pre');
  shown.id = 'measured';
  shown.textContent = event.data;
  document.body.append(shown);
});
</script><body><iframe src="SOURCE" style="width: WIDTHpx; height: 900px; border: 0"></iframe>
"""


def open_page(path: Path, *, width: int = 1600, dark: bool = False) -> str:
    """Open a file; return the lines of the browser's console."""
    return _run(path, width, dark, "--dump-dom").stderr


def measure_page(html: str, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """Return what a script measures in a page: overflow, contrast, the text of cells, cut texts."""
    # the page itself forbids scripts
    allowed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    path = folder / f"measured-{width}-{dark}.html"
    path.write_text(allowed.replace("</body>", f"{_MEASURE}</body>"), encoding="utf-8")
    frame = folder / f"frame-{width}-{dark}.html"
    around = _FRAME.replace("SOURCE", path.name).replace("WIDTH", str(width))
    frame.write_text(around, encoding="utf-8")
    shown = _run(frame, width + 100, dark, "--dump-dom").stdout
    found = re.search(r'<pre id="measured">(.*?)</pre>', shown, re.DOTALL)
    assert found, shown[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    measured: dict[str, Any] = json.loads(text)
    return measured


def _run(path: Path, width: int, dark: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={path.parent / 'profile'}",
            f"--window-size={width},900",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *arguments,
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
