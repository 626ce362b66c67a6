"""What the library says: one logger, `perilune`, silent unless somebody listens."""

import logging


def show_logs(debug: bool = False) -> None:
    """Prints the library's log lines to stderr: what was decided at INFO, everything with `debug`."""
    from rich.console import Console
    from rich.logging import RichHandler

    logger = logging.getLogger("perilune")
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    if not logger.handlers:
        logger.addHandler(RichHandler(console=Console(stderr=True), show_path=debug, show_time=False, show_level=False))
