"""What a form of the residual costs: time of a step, alone on the device, and memory until the backward pass."""

import statistics
import time
from typing import Any

import torch

from experiments.depth.recipes import Scale, Stack, Variant
from experiments.depth.texts import Rows
from experiments.depth.train import Net, Place, Training

WARM = 3  # steps before the first that counts


def cost(scale: Scale, stack: Stack, variant: Variant, rows: Rows, place: Place) -> dict[str, Any]:
    """Medians of steps in milliseconds; MB that the forward pass keeps for the backward; on a GPU the most it holds."""
    net = Net(stack, variant, 0, place)
    training = Training(net, stack, rows, stack.rates[0], 0, WARM + scale.timed_steps)
    batch = training.batch(0)
    on_gpu = place.device.type == "cuda"
    net.loss(*batch).backward()  # what is compiled or set aside at first use
    net.zero_grad(set_to_none=True)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(place.device)
    kept, loss = kept_bytes(net, *batch)
    loss.backward()
    del loss  # and its graph, whose accumulators would go on where they are
    place.wait()
    peak = torch.cuda.max_memory_allocated(place.device) if on_gpu else None
    times = []
    for step in range(WARM + scale.timed_steps):
        place.wait()
        start = time.perf_counter()
        training.step()
        place.wait()
        if step >= WARM:
            times.append(time.perf_counter() - start)
    return {
        "stack": stack.name, "variant": variant.name, "recorded": training.recorded,
        "step_ms": round(1e3 * statistics.median(times), 2),
        "fastest_ms": round(1e3 * min(times), 2), "kept_mb": round(kept / 1e6, 1),
        "peak_mb": None if peak is None else round(peak / 1e6, 1),
        "parameters": sum(p.numel() for p in net.parameters()), "flops": round(net.compute),
        "inner": net.model.config.intermediate_size, "machine": place.machine(),
    }  # fmt: skip


def kept_bytes(net: Net, ids: torch.Tensor, targets: torch.Tensor) -> tuple[int, torch.Tensor]:
    """What autograd holds on to after a forward pass, each storage once, parameters not counted; and the loss."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = net.loss(ids, targets)
    return sum(kept.values()), loss
