"""Runs put together."""

from perilune.train.config import Run


def joined(first: Run, *further: Run) -> Run:
    """One run through the stages of all; model, data, optimizer and seed are the first one's."""
    return first.replace(stages=sum((run.stages for run in (first, *further)), ()))
