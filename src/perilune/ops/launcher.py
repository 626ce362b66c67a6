"""Kernels of Triton and Gluon with little to do on the host from their second launch on.

Triton looks at every argument of every launch to find out which compiled form serves: 100 to 150 microseconds for
thirty arguments, as long as many a kernel runs.  Here what a form depends on is looked up, and the form is launched as
it is.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver


class Launcher:
    """Decorates a kernel, which is then launched as before, over one axis: `kernel[(programs,)](*args, **constants)`.

    args: in the kernel's order; constants: the rest of its arguments, all constexpr, and options of the compiler.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.forms: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            if not isinstance(self.kernel, JITFunction) or observed():  # interpreted, there is nothing to save
                self.kernel[grid](*args, **constants)
            else:
                self._launch(grid, args, constants)

        return launch

    def _launch(self, grid: tuple[int], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        device = driver.active.get_current_device()
        parameters = self.kernel.params
        kinds = (x if parameter.is_constexpr else kind(x) for x, parameter in zip(args, parameters))
        key = (device, *kinds, *constants.items())
        form = self.forms.get(key)
        if form is None:
            self.forms[key] = self.kernel[grid](*args, **constants)  # compiles, and launches
            return
        form.run(
            grid[0], 1, 1, driver.active.get_current_stream(device), form.function, form.packed_metadata,
            None, None, None, *args, *(constants[parameter.name] for parameter in parameters[len(args) :]),
        )  # fmt: skip


def observed() -> bool:
    """Whether a profiler wants to be told of launches by Triton itself."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def kind(x: Any) -> Any:
    """What a form depends on: a tensor's dtype and alignment, what Triton sees of an integer, a descriptor's tiles, and
    all of a tuple's items."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return type(x), x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31
    if x is None or isinstance(x, float):
        return type(x)
    if isinstance(x, tuple):
        return tuple(map(kind, x))
    return type(x), x.base.dtype, tuple(x.block_shape), getattr(x, "layout", None)
