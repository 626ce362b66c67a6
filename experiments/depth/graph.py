"""Forward and backward pass recorded once as a CUDA graph: a deep model of small kernels waits for nobody to launch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM = 3  # passes before the recording: kernels compile, libraries make their workspaces


class Graph:
    """`loss_of(ids, targets)` and its backward pass over parameters of `module`, for batches of one shape.

    Calling it leaves gradients in `.grad`, which have to stay where they are.
    """

    def __init__(
        self, module: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], ids: Tensor, targets: Tensor
    ) -> None:
        self.ids, self.targets = ids.clone(), targets.clone()
        stream = torch.cuda.Stream()  # of both: gradients are accumulated on the stream that first asked for them
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                module.zero_grad(set_to_none=True)
                loss_of(self.ids, self.targets).backward()
        torch.cuda.current_stream().wait_stream(stream)
        module.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.loss = loss_of(self.ids, self.targets)
            self.loss.backward()

    def __call__(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.ids.copy_(ids)
        self.targets.copy_(targets)
        self.graph.replay()
        return self.loss.detach()
