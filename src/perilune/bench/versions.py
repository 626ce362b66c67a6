"""Versions of what a figure was made with."""

from importlib.metadata import PackageNotFoundError, version


def installed(package: str) -> str | None:
    """None where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
