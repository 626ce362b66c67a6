"""Parameters that must not fall below float32, whatever the model around them is cast to."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 where it is that already: the inside of a float32 island."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Float32Parameters(nn.Module):
    """A module whose parameters and buffers named in `float32` survive `.bfloat16()`, `.half()`, `.to(dtype)` and
    loading with `assign=True`.

    They follow the device, and they follow `.double()`.  Which tensors a K3-class model keeps so: the decay's `A_log`
    and `dt_bias`, convolution filters, KDA's output norm, the router's selection bias.
    """

    float32: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():
                child._apply(fn)
        own = [t for name in self.float32 if (t := getattr(self, name)) is not None]
        kept = {id(t) for t in own} | {id(t.grad) for t in own if t.grad is not None}

        def keeping(t: Tensor) -> Tensor:
            new = fn(t)
            fell = id(t) in kept and new.is_floating_point() and new.dtype.itemsize < 4
            return t.to(new.device, torch.float32) if fell else new

        return super()._apply(keeping, recurse=False)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._apply(lambda t: t, recurse=False)  # `assign=True` took the file's dtype
