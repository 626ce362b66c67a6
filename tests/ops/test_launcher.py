"""Launches of compiled forms, with a compiler and a driver that say what they are asked for."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from perilune.ops import launcher
from perilune.ops.launcher import Launcher, seen


class Kernel:
    """f(x, n, eps, y, H: constexpr, W: constexpr)"""

    def __init__(self):
        self.params = [
            SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "n", "eps", "y", "H", "W")
        ]
        self.compiled, self.ran = [], []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.compiled.append((grid, args, constants))
            return SimpleNamespace(run=lambda *a: self.ran.append(a), function="function", packed_metadata="metadata")

        return compile_and_launch


@pytest.fixture
def kernel(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: f"stream {device}")
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    return Kernel()


X = torch.zeros(64)


def test_the_second_launch_runs_the_form_that_the_first_compiled(kernel):
    launch = Launcher(kernel)
    launch[5,](X, 32, 0.5, None, 7, W=8, num_warps=4)
    assert kernel.compiled == [((5,), (X, 32, 0.5, None, 7), {"W": 8, "num_warps": 4})]
    other = torch.ones(32)
    launch[6,](other, 48, 0.25, None, 7, W=8, num_warps=4)
    assert len(kernel.compiled) == 1
    assert kernel.ran == [(6, 1, 1, "stream 3", "function", "metadata", None, None, None, other, 48, 0.25, None, 7, 8)]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((X.double(), 32, 0.5, None, 7), {}),
        ((X[1:], 32, 0.5, None, 7), {}),  # at another alignment
        ((X, 33, 0.5, None, 7), {}),  # no multiple of 16
        ((X, 1, 0.5, None, 7), {}),
        ((X, 1 << 32, 0.5, None, 7), {}),
        ((X, 32, 0.5, X, 7), {}),
        ((X, 32, 0.5, None, 9), {}),  # another constant
        ((X, 32, 0.5, None, 7), {"W": 16}),
        ((X, 32, 0.5, None, 7), {"num_warps": 8}),
    ],
)
def test_what_triton_compiles_anew_is_compiled_anew(args, constants, kernel):
    launch = Launcher(kernel)
    launch[5,](X, 32, 0.5, None, 7, W=8, num_warps=4)
    launch[5,](*args, **{"W": 8, "num_warps": 4} | constants)
    assert len(kernel.compiled) == 2
    assert not kernel.ran


def test_what_triton_tells_apart_is_told_apart():
    """By what Triton itself makes of arguments; sizes and strides stay below 2^63."""
    binding = pytest.importorskip("triton._C.libtriton")
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    if not hasattr(binding, "native_specialize_impl"):
        pytest.skip("another release of Triton")
    near = [n + d for n in (0, 16, 1 << 31, -(1 << 31), 1 << 32) for d in (-16, -1, 0, 1, 16)]
    tensors = [x for d in (torch.float32, torch.bfloat16, torch.int32, torch.int64) for x in (X.to(d), X.to(d)[1:])]
    alone = [*near, *tensors, X[:0], True, False, None, 0.0, 1.0]
    together = [(), (1, 16), (3, 16), (X, 3), (X[1:], 3), (None, None)]
    forms = {}
    for x in alone + together:
        form = binding.native_specialize_impl(compiler.CUDABackend, x, False, True, True)
        assert forms.setdefault(repr(seen((x,))[1]), form) == form, x
    assert len(forms) > 20


@pytest.mark.parametrize("known", [True, False])
def test_descriptors_are_told_apart_by_their_tiles(known, kernel):
    """By what they say of themselves or, where they say nothing, by what they are."""

    def descriptor(*block_shape):
        kind = {"kind": (X.dtype, *block_shape)} if known else {}
        return SimpleNamespace(base=X, block_shape=list(block_shape), layout="layout", **kind)

    launch = Launcher(kernel)
    for blocks in ((64, 64), (64, 128), (64, 64)):
        launch[5,](descriptor(*blocks), 32, 0.5, None, 7, W=8)
    assert len(kernel.compiled) == 2
    assert len(kernel.ran) == 1


def test_profilers_see_every_launch(kernel, monkeypatch):
    monkeypatch.setattr(launcher.knobs.runtime.launch_enter_hook, "calls", [print])
    launch = Launcher(kernel)
    for _ in range(2):
        launch[5,](X, 32, 0.5, None, 7, W=8)
    assert len(kernel.compiled) == 2


def test_interpreted_kernels_are_called_as_they_are():
    calls = []
    interpreted = {(5,): lambda *args, **constants: calls.append((args, constants))}
    for _ in range(2):
        Launcher(interpreted)[5,](1, W=2)
    assert calls == [((1,), {"W": 2})] * 2
