"""Adapters for other people's models.  Nothing here is imported by the rest; each file needs the library it is for.

What they offer can be had from here, and is loaded when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.integrations.attn_res import add_attn_res, load_attn_res
    from perilune.integrations.balancing import balance
    from perilune.integrations.transformers import replace_attention

__all__ = ["add_attn_res", "balance", "load_attn_res", "replace_attention"]
_FILES = {
    "add_attn_res": "attn_res",
    "balance": "balancing",
    "load_attn_res": "attn_res",
    "replace_attention": "transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
