"""Whole runs as functions; none needs torch to be imported.

A recipe is called and changed: `nano().replace(seed=1)`, or `perilune train nano seed=1`.
"""

from collections.abc import Callable

from perilune.core.errors import ConfigError, nearest
from perilune.recipes.nano import nano
from perilune.train.config import Run

RECIPES: dict[str, Callable[[], Run]] = {"nano": nano}


def get(name: str) -> Run:
    """The recipe of that name; ConfigError if there is none."""
    if name not in RECIPES:
        raise ConfigError(f"recipe: there is none called {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]()
