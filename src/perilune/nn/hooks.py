"""Whether a module may be computed along with another: not where somebody has to be told of its call."""

from torch import nn

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it is of that very class, as it was written: not compiled, without hooks."""
    written = type(module) is kind and "forward" not in module.__dict__ and module._compiled_call_impl is None
    return written and not any(getattr(module, name) for name in HOOKS)
