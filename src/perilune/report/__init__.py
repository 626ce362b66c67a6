"""Pages that show what a model learned, made from runs' files alone: `write_report`, `write_comparison`."""

from collections.abc import Sequence
from pathlib import Path


def check_pages() -> None:
    """Raises BackendError where pages cannot be made: before what they are to show has cost hours."""
    from perilune.report.page import plotly_script

    plotly_script()


def write_report(run: Path, out: Path | None = None) -> Path:
    """Writes the page of the run in folder `run` to `out` (`run/report.html`); returns where.

    CheckpointError if the folder is no run, BackendError without plotly, DataError where `out` cannot be.
    """
    from perilune.report.page import report, write_page
    from perilune.report.read import read_run

    return write_page(out or run / "report.html", report(read_run(run)))


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Writes a page that sets the runs in these folders side by side to `out`; returns where.

    Runs whose configurations differ by the seed alone are one variant.  Errors as in `write_report`.
    """
    from perilune.report.compare import comparison
    from perilune.report.page import write_page
    from perilune.report.read import read_run

    return write_page(out, comparison([read_run(run) for run in runs]))
