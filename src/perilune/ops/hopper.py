"""Where kernels written for Hopper run."""

import torch
from torch import Tensor


def not_hopper(x: Tensor) -> str | None:
    """Why they cannot run where x lies, or None.  AMD counts its own GPUs up to 9 as well."""
    if not x.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(x.device)[0] != 9:
        return "it is written for Hopper (compute capability 9)"
    return None
