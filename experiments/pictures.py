"""Figures as PNG, drawn by a Chromium that is installed anyway: plotly has no other way without a package more."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from perilune.core.errors import BackendError
from perilune.report.draw import Figure
from perilune.report.page import plotly_script
from perilune.report.theme import LIGHT

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, MARGIN = 1000, 10  # px of a figure; around it, for plotly has titles of axes touch its edge
SCALE = 1.5


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def write_png(figure: Figure, path: Path, browser: str) -> None:
    """Whole or not at all.  Raises BackendError where the browser draws nothing."""
    shown = figure["layout"] | {"paper_bgcolor": LIGHT["card"], "plot_bgcolor": LIGHT["card"], "width": WIDTH}
    drawing = json.dumps({"data": figure["data"], "layout": shown, "config": {"staticPlot": True}})
    width, height = (size + 2 * MARGIN for size in (WIDTH, figure["layout"]["height"]))
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder, "page.html"), Path(folder, "picture.png")
        page.write_text(
            f'<!doctype html><meta charset="utf-8"><body style="margin:{MARGIN}px"><div id="plot"></div>'
            f"<script>{plotly_script()}</script><script>Plotly.newPlot('plot', {drawing})</script>",
            encoding="utf-8",
        )
        words = [
            browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--force-device-scale-factor={SCALE}",
            f"--window-size={width},{height}", f"--user-data-dir={folder}/profile", "--virtual-time-budget=8000",
            *["--no-sandbox"] * (os.geteuid() == 0), f"--screenshot={picture}", page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, timeout=120, check=False)
        if not picture.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise BackendError(f"{browser}: expected a picture, got {said[-1:] or 'nothing'}; try another browser")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        shutil.copyfile(picture, partial)
        partial.replace(path)
