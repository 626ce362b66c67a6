"""Kernels of Triton and Gluon with little to do on the host from their second launch on.

Triton looks at every argument of every launch to find out which compiled form serves: 100 to 150 microseconds for
thirty arguments, as long as many a kernel runs.  Here what a form depends on is looked up, and the form is launched as
it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver


class Launcher:
    """Decorates a kernel, which is then launched as before, over one axis: `kernel[(programs,)](*args, **constants)`.

    args: in the kernel's order; constants: the rest of its arguments, all constexpr, and options of the compiler.
    Constants that are equal count as one: none may be 1 in one call and True in another.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.forms: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        self.fixed = [i for i, parameter in enumerate(getattr(kernel, "params", ())) if parameter.is_constexpr]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        if not isinstance(self.kernel, JITFunction) or observed():  # interpreted, there is nothing to save
            return self.kernel[grid]
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *args: Any, **constants: Any) -> None:
        device = driver.active.get_current_device()
        values, kinds = seen(args)
        key = (device, *kinds, *[args[i] for i in self.fixed if i < len(args)], *constants.items())
        found = self.forms.get(key)
        if found is None:
            named = tuple(constants[parameter.name] for parameter in self.kernel.params[len(args) :])
            self.forms[key] = self.kernel[grid](*args, **constants), named  # compiles, and launches
            return
        form, named = found
        form.run(
            grid[0], 1, 1, driver.active.get_current_stream(device), form.function, form.packed_metadata,
            None, None, None, *values, *named,
        )  # fmt: skip


def observed() -> bool:
    """Whether a profiler wants to be told of launches by Triton itself."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def seen(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What a launch is given: addresses instead of tensors, which takes the driver less time; and what a form depends
    on: a tensor's dtype and alignment, what Triton sees of an integer, a descriptor's tiles, all of a tuple's items."""
    values = list(args)
    kinds: list[Any] = []
    for i, x in enumerate(args):
        of = type(x)
        if of is int:
            kinds.append((x & 15 == 0, x == 1, -(1 << 31) <= x < 1 << 31))
        elif isinstance(x, Tensor):
            at = x.data_ptr()
            kinds.append((x.dtype, at & 15 == 0))
            if x.is_cuda:  # Triton refuses others
                values[i] = at
        elif isinstance(x, tuple):
            kinds.append(tuple(seen(x)[1]))
        elif x is None or of is float or of is bool:
            kinds.append(of)
        else:
            kinds.append(getattr(x, "kind", None) or tiles(x))
    return values, kinds


def tiles(x: Any) -> tuple[Any, ...]:
    """What a form depends on of a descriptor that has no `kind` itself."""
    return type(x), x.base.dtype, *x.block_shape, getattr(x, "layout", None)
