"""Calls of KDA that are hard for its kernels, and how far from the float64 recurrence each may end up."""

import math
import os
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from perilune.ops.kda import BoundedGate, SoftplusGate, kda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

GATES = {"bounded": BoundedGate, "deep": partial(BoundedGate, g_min=-20.0), "softplus": SoftplusGate, "none": None}
SIGMOIDS = ("bounded", "deep")  # "deep" goes below what float32 holds over a tile of 16 rows
CASES = {  # by gate
    "bounded": (
        "random", "fast", "mixed", "slow", "floor", "ceiling", "halves", "alternate", "checkered",
        "same_key", "converged", "no_write", "full_write", "large_values", "large_state", "steep", "flat", "shut",
    ),
    "deep": ("random", "floor", "alternate", "steep"),
    "softplus": ("random", "fast", "mixed", "same_key", "steep", "flat"),
    "none": ("random", "mixed", "halves", "alternate", "jumps", "cliffs", "same_key"),
}  # fmt: skip


class Form(NamedTuple):
    """What computes, and on what."""

    backend: str
    dtype: torch.dtype
    K: int
    V: int

    def serves(self, gate: str) -> bool:
        return self.backend == "triton" or gate == "bounded"

    def __str__(self) -> str:
        return f"{self.backend}-{str(self.dtype).removeprefix('torch.')}-{self.K}-{self.V}"


if INTERPRETED:
    FORMS = [Form("triton", f32, 16, 32), Form("triton", bf16, 32, 16)]
elif GPU:
    FORMS = [
        Form("gluon", bf16, 128, 128),
        Form("triton", bf16, 128, 128),
        Form("triton", bf16, 64, 64),
        Form("triton", f32, 128, 128),
        Form("triton", f32, 64, 128),
    ]
else:
    FORMS = []

# Norm of the difference over the norm, for K = V = 128 and the bounded gate.  Rounding outputs to bfloat16 alone leaves
# 1.7e-3; the interpreter cuts it off instead of rounding it, which doubles every error.
NARROW = {"o": 4e-3, "state": 4e-3, "dinitial": 4e-3, "dg": 6e-3, "dA_log": 1.5e-2, "ddt_bias": 1.5e-2}
ADVERSARIAL = {
    "same_key": {  # the more so in segments, which join by maps that nearly cancel
        "o": 1.5e-2,
        "state": 1.5e-2,
        "dq": 1.5e-2,
        "dk": 8e-3,
        "dv": 3e-2,
        "dg": 1.5e-2,
        "dbeta": 6e-2,
    },
    "converged": {"dk": 6e-3, "dbeta": 0.3},  # states in bfloat16 have no more digits left of what they fail to predict
    **{case: {"dA_log": 3e-2} for case in ("ceiling", "halves", "slow")},  # few numbers, sums in which little is left
    "shut": {"dg": 1.5e-2, "ddt_bias": 2e-2},  # one gate in a hundred has a gradient at all
}
WIDE = {
    "same_key": {"dA_log": 3e-5},
    "converged": {"dbeta": 3e-4, "dA_log": 3e-5},
    "shut": dict.fromkeys(("dg", "dA_log", "ddt_bias"), 1e-4),
    "steep": dict.fromkeys(("dg", "dA_log", "ddt_bias"), 1e-4),
    "random": {"ddt_bias": 2e-5},
    "fast": {"dA_log": 3e-5, "ddt_bias": 3e-5},
}


def tolerance(name: str, form: "Form", case: str = "random", gate: str = "bounded") -> float:
    """Of the output or gradient `name`."""
    if form.dtype == f32:
        return WIDE.get(case, {}).get(name, 1e-5)
    narrow = ADVERSARIAL.get(case, {}).get(name, NARROW.get(name, 5e-3))
    return narrow * (3 if INTERPRETED else 1 if gate == "bounded" and form.K == form.V == 128 else 2)


@dataclass(frozen=True)
class Call:
    """One call of `kda` and the gradients that come back to it."""

    inputs: dict[str, Tensor]  # q, k, v, g, beta, initial and, with a gate, A_log, dt_bias
    do: Tensor | None
    dstate: Tensor | None
    gate: str
    case: str = "random"
    options: dict[str, Any] = field(default_factory=dict)

    def forward(self, backend: str, inputs: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        x = self.inputs if inputs is None else inputs
        gate = GATES[self.gate](x["A_log"], x["dt_bias"]) if self.gate != "none" else None
        arguments = [x[name] for name in ("q", "k", "v", "g", "beta")]
        return kda(
            *arguments, initial_state=x["initial"], output_final_state=True, gate=gate, backend=backend, **self.options
        )

    def run(self, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Outputs and the gradients of all inputs, computed in `dtype`."""
        leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in self.inputs.items()}
        o, state = self.forward(backend, leaves)
        outer = [(x, d.to(x.dtype)) for x, d in ((o, self.do), (state, self.dstate)) if d is not None]
        outputs, douter = zip(*((x, d) for x, d in outer if x.requires_grad))  # of no documents, states do not
        grads = torch.autograd.grad(outputs, list(leaves.values()), douter, allow_unused=True)
        zeros = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves.values(), grads))
        return {"o": o.detach(), "state": state.detach(), **{f"d{name}": x for name, x in zip(leaves, zeros)}}

    def oracle(self, backend: str = "reference") -> dict[str, Tensor]:
        """The same in float64."""
        torch.use_deterministic_algorithms(False)  # some of its operations have no such form on a GPU
        try:
            return self.run(backend, f64)
        finally:
            torch.use_deterministic_algorithms(True)

    def check(self, form: Form, want: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """That `form` does as the recurrence does; returns what it gave."""
        got, want = self.run(form.backend), want or self.oracle()
        errors = {name: error(got[name], x, self._size(name, want)) for name, x in want.items()}
        wrong = {name: f"{e:.1e}" for name, e in errors.items() if not e < tolerance(name, form, self.case, self.gate)}
        assert not wrong, f"{self.case}, {self.gate}: {wrong}"
        return got

    def _size(self, name: str, want: dict[str, Tensor]) -> float:
        """What an error is measured by besides the norm: one number a head is small by chance, its terms are not."""
        if name != "dA_log":
            return 0.0
        x = (self.inputs["g"] + self.inputs["dt_bias"]).double()
        return float((want["dg"] * (x if self.gate in SIGMOIDS else softplus(x) / x.sigmoid())).norm())

    def changed(self, **inputs: Tensor) -> "Call":
        return replace(self, inputs=self.inputs | inputs)

    def part(self, start: int, stop: int, sequences: slice = slice(None), cu: list[int] | None = None) -> "Call":
        """Its tokens from `start` to `stop`, with the states of these sequences."""
        inputs = {
            name: x if name in ("A_log", "dt_bias") else x[sequences] if name == "initial" else x[:, start:stop]
            for name, x in self.inputs.items()
        }
        do = None if self.do is None else self.do[:, start:stop]
        dstate = None if self.dstate is None else self.dstate[sequences]
        return replace(self, inputs=inputs, do=do, dstate=dstate, options=self.options | {"cu_seqlens": cu})


def error(got: Tensor, want: Tensor, size: float = 0.0) -> float:
    """Norm of the difference over the norm, or over `size` if that is more."""
    assert got.shape == want.shape
    assert got.isfinite().all()
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp_min(max(size, 1e-30)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def all_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def make(
    form: Form,
    lengths: list[int],
    case: str = "random",
    gate: str = "bounded",
    *,
    H: int = 1,
    batch: int = 1,
    packed: bool = True,
    **options: Any,
) -> Call:
    """A call on documents laid end to end, or on `batch` rows of one length where not `packed`.

    Keys are normalized by the kernel and strengths are logits unless `options` say otherwise; then they come so.
    """
    _, dtype, K, V = form
    T, N = sum(lengths), batch * len(lengths)
    options = {"normalize_qk": True, "beta_logits": case not in ("no_write", "full_write")} | options
    if packed and batch == 1:
        options["cu_seqlens"] = [0, *accumulate(lengths)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=f64)

    q, k, v, z = normal(batch, T, H, K), normal(batch, T, H, K), normal(batch, T, H, V), normal(batch, T, H, K)
    beta, initial = normal(batch, T, H), 0.5 * normal(N, H, K, V)
    A_log, dt_bias = 0.3 * normal(H), 0.3 * normal(H, K)
    if case == "same_key":
        k = normal(1, 1, H, K) + 1e-3 * k
        beta = 8 + beta
    if case == "converged":  # the state predicts v already, but for a part in two hundred
        initial = 100 * initial
        row = torch.arange(N).repeat_interleave(torch.tensor(lengths * batch))
        v = 0.5 * v + torch.einsum("thk,thkv->thv", normalize(k, dim=-1).flatten(0, 1), initial[row]).view_as(v)
    if case == "large_values":
        v = 1e3 * v
    if case == "large_state":
        initial = 1e3 * initial
    if case in ("no_write", "full_write"):
        beta = torch.full_like(beta, float(case == "full_write"))
    elif not options["beta_logits"]:
        beta = beta.sigmoid()
    if not options["normalize_qk"]:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    if (case, gate) == ("fast", "softplus"):
        A_log = torch.full_like(A_log, math.log(16))  # the fastest that a Kimi Linear is made with
    if case in ("steep", "flat"):  # exp(A_log) = 22026 or its inverse
        A_log, dt_bias = torch.full_like(A_log, 10.0 if case == "steep" else -10.0), 0 * dt_bias
    g = _decay(case, gate, z)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    parameters = {"A_log": A_log, "dt_bias": dt_bias} if gate != "none" else {}
    return Call(
        {name: x.to(DEVICE, dtype) for name, x in inputs.items()}
        | {name: x.to(DEVICE, f32) for name, x in (parameters | {"initial": initial}).items()},
        normal(*v.shape).to(DEVICE, dtype),
        0.3 * K**-0.5 * normal(*initial.shape).to(DEVICE, f32),  # no more than what do brings to a token
        gate,
        case,
        options,
    )


def _decay(case: str, gate: str, z: Tensor) -> Tensor:
    """Logits, or without a gate the logarithms themselves, from normal z [B, T, H, K]."""
    low, high = (20.0, -20.0) if gate in SIGMOIDS else (5.0, -16.0)
    if gate == "none":
        low, high = -5.0, -1e-6
    channel, token = torch.arange(z.shape[3]) % 2, torch.arange(z.shape[1])[:, None, None] % 2
    ends = {
        "floor": torch.zeros(()),
        "ceiling": torch.ones(()),
        "converged": torch.ones(()),
        "halves": channel,
        "alternate": token,
        "checkered": (channel + token) % 2,
    }
    if case in ends:
        return torch.where(ends[case].bool(), high, low).double().expand_as(z)
    if case == "cliffs":
        return torch.where(z > 1.3, -1e4, -z.abs())
    if case == "jumps":
        return -50 * torch.rand(z.shape, dtype=f64) ** 8
    if case == "steep":  # so that the rate takes them to where gates are not shut
        return 1e-4 * z if gate in SIGMOIDS else 2 * z - 10
    if case == "flat" and gate in SIGMOIDS:
        return 1e4 * z
    if case == "shut":
        return 1e3 * z
    logits = z + {"fast": 2 if gate in SIGMOIDS else 0, "slow": -8, "same_key": -8}.get(case, 0)
    if case == "mixed":
        logits = logits - 8 * channel
    return logits if gate != "none" else -5 * logits.sigmoid()
