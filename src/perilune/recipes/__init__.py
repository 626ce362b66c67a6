"""Whole runs as functions; none needs torch to be imported.

A recipe is called and changed: `nano().replace(seed=1)`, or `perilune train nano seed=1`.
"""

from collections.abc import Callable

from perilune.core.errors import ConfigError, nearest
from perilune.recipes import ladder
from perilune.recipes.long_context import recipes
from perilune.recipes.nano import nano, nano_2k, nano_8k, nano_128, nano_512
from perilune.train.config import Run

RECIPES: dict[str, Callable[[], Run]] = {
    "nano": nano,
    "nano_128": nano_128,
    "nano_512": nano_512,
    "nano_2k": nano_2k,
    "nano_8k": nano_8k,
    **recipes("small", tokens=2.5e9, batch_tokens=131_072, lr=2e-3),
    **recipes("1b", tokens=2e10, batch_tokens=524_288, lr=1e-3),
    **recipes("10b", tokens=3e11, batch_tokens=4_194_304, lr=5e-4),
    **recipes("30b", tokens=1e12, batch_tokens=8_388_608, lr=4e-4),
    **recipes("100b", tokens=3e12, batch_tokens=16_777_216, lr=3e-4),
    **recipes("k3", tokens=1.5e13, batch_tokens=67_108_864, lr=2e-4),
    **ladder.RECIPES,
}


def get(name: str) -> Run:
    """The recipe of that name; ConfigError if there is none."""
    if name not in RECIPES:
        raise ConfigError(f"recipe: there is none called {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]()
