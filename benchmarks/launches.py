"""How much a training step of `1b` launches on a Hopper GPU, counted on any machine: `python benchmarks/launches.py`.

A step runs on tensors without data that pass for a GPU's, so that every operation takes its fast path; kernels of
Triton and Gluon are counted instead of started, torch's operations as they are dispatched.  Operations on lists count
as often as torch cuts them up, `baddbmm` and padding twice.  What CUDA would split further, and copies from the host,
are not seen: a lower bound, to compare one version with another.
"""

import math
import sys
import warnings
from collections import Counter
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import JITFunction

from perilune.bench.training import MadeUp, Work
from perilune.ops.launcher import Launcher
from perilune.train import loop

VIEWS = (
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "expand", "lift_fresh",
    "new_empty", "permute", "select", "slice", "split", "squeeze", "t.", "transpose", "unbind", "unfold", "unsqueeze",
    "view",
)  # fmt: skip
TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}  # of a launch of an operation on so many lists
BLOCKS, NUMBERS = 320, 65536  # of such a launch, of a block


class Counting(TorchDispatchMode):
    """Launches by what was called, and by the function of ours that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.on = False

    def note(self, name: str, number: int = 1) -> None:
        frame = sys._getframe(2)
        while frame and "/perilune/" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = "autograd" if frame is None else frame.f_code.co_filename.split("/perilune/")[-1]
        self.seen[place if frame is None else f"{place}:{frame.f_code.co_name}", name] += self.on * number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("aten.") and not name[5:].startswith(VIEWS) and "promote_types" not in name:
            lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], torch.Tensor)]
            times = 2 if "baddbmm" in name or "constant_pad" in name else 1
            if "_foreach" in name:
                blocks = sum(-(-x.numel() // NUMBERS) for x in lists[0])
                times = max(math.ceil(blocks / BLOCKS), math.ceil(len(lists[0]) / TENSORS.get(len(lists), 30)))
            self.note(name[5:], times)
        return func(*args, **(kwargs or {}))


class Arrival(SimpleNamespace):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor=lambda: tensor)


def pretend(counting: Counting) -> None:
    """That fake tensors are a GPU's and a Hopper is there; that nothing is looked at."""
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch._assert_async = lambda *_: None
    FakeTensor.is_cuda = property(lambda self: counting.on)
    FakeTensor.data_ptr = lambda self: 0

    def launched(kernel: Any, grid: Any) -> Any:
        name = getattr(getattr(kernel, "kernel", kernel), "__name__", "kernel")
        return lambda *args, **constants: counting.note(name)

    Launcher.__getitem__ = JITFunction.__getitem__ = launched

    def replace(module: str, **values: Any) -> None:
        for name, value in values.items():
            setattr(import_module(f"perilune.{module}"), name, value)

    def real(module: str, name: str) -> None:  # tables of numbers, which the host makes
        made = getattr(import_module(f"perilune.{module}"), name)

        def outside(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return made(*args, **kwargs)

        replace(module, **{name: outside})

    def wide(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty_like(torch.mm(a, b), dtype=dtype)

    real("ops.kda.kernels.chunks", "chunks_of")
    real("ops.short_conv.kernels.launch", "documents_of")
    replace("ops.projections.chunked", weight_gradient=lambda dy, x, dtype: wide(dy.T, x, dtype))
    for module in ("ops.wide_linear.parts", "ops.cross_entropy.fused"):
        replace(module, wide_product=wide, add_product_=lambda total, a, b: (torch.mm(a, b), total)[1])
    replace("nn.project", _plain=lambda layer: True)
    replace("ops.grouped_experts.api", _check=lambda *_: None)
    replace("optim.qk_clip", bool=lambda _: True)
    replace("optim.newton_schulz", CPU_BATCH=import_module("perilune.optim.newton_schulz").DEVICE_BATCH)
    replace("optim.muon", adamw=partial(import_module("perilune.optim.muon").adamw, foreach=True))
    norm = partial(import_module("perilune.train.parallel.ranks").get_total_norm, foreach=True)
    replace("train.parallel.ranks", get_total_norm=norm)
    import_module("torch.optim.adam")._get_value = lambda x: 1.0
    loop.Arrival = Arrival
    loop.K3Model.to = lambda self, *_: self

    def checked(trainer: loop.Trainer, losses: dict[str, torch.Tensor], tokens: int) -> loop.Update:
        trainer.ranks.figures([p.grad for p in trainer.model.parameters() if p.grad is not None], [*losses.values()])
        return loop.Update(losses={}, grad_norm=1.0)

    loop.Trainer._checked = checked


def main() -> None:
    warnings.simplefilter("ignore")
    counting = Counting()
    pretend(counting)
    run = Work("1b_8k", 8192, 8192).run(2)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        trainer = loop.Trainer(run, MadeUp(run))
        for group in trainer.optimizer.param_groups:
            group["ns_dtype"] = torch.bfloat16
    for _ in range(2):  # the first one makes what later ones find
        batch = trainer.feed.next()
        counting.seen.clear()
        with fake, counting:
            counting.on = True
            trainer.step(batch)
            counting.on = False
    places: Counter[str] = Counter()
    for (place, _), number in counting.seen.items():
        places[place] += number
    say = Console(width=200, highlight=False, markup=False).print
    say(f"{sum(places.values()):,} launches a step")
    for place, number in places.most_common(40):
        names = ", ".join(f"{n} {name}" for (own, name), n in counting.seen.most_common() if own == place)
        say(f"{number:6,} {place:50} {names[:150]}")


if __name__ == "__main__":
    main()
