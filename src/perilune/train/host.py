"""From a device to the host without waiting for what the device has yet to do."""

import torch
from torch import Tensor


class Arrival:
    """A tensor on its way to the host; what is done to it on the device afterwards does not show."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        if not tensor.is_cuda:
            self._here, self._event = tensor.to("cpu", copy=True), None
            return
        self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._here.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    def tensor(self) -> Tensor:
        """On the CPU, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._here
