"""Which experts a token takes, and with which weights."""

from perilune.ops.route.api import route, stable_topk

__all__ = ["route", "stable_topk"]
