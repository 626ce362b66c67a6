"""What this machine has, and which backend each operation takes for usual inputs here, with the reason."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from perilune.core.backends import Backends

MODULES = (
    "kda.api",
    "kda.decode",
    "short_conv.api",
    "attn_res.api",
    "attn_res.two_phase",
    "projections.api",
    "rms_norm.api",
    "situ_glu.api",
    "grouped_experts.api",
    "quantile_bias.api",
    "cross_entropy.api",
    "wide_linear.api",
    "route.api",
)
"""Below `perilune.ops`, each with the backends of one operation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    import os
    import platform

    import torch
    from rich.console import Console
    from rich.table import Table

    from perilune import __version__

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = {
        "perilune": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CPU": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "CUDA": torch.cuda.get_device_name() if device.type == "cuda" else "none",
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    for backends in _backends():
        table.add_row(f"ops.{backends.op}", _choice(backends, device))
    Console().print(table)
    return 0


def _backends() -> "Iterator[Backends]":
    """Those of each operation."""
    from importlib import import_module

    from perilune.core.backends import Backends

    for module in MODULES:
        yield from (x for x in vars(import_module(f"perilune.ops.{module}")).values() if isinstance(x, Backends))


def _choice(backends: "Backends", device: "torch.device") -> str:
    """What `auto` takes, why the better ones stand back, and what else can be asked for."""
    args, options = USUAL[backends.op](device) if backends.op in USUAL else ((), {})
    name, refusals = backends.choice(*args, **options)
    others = [other for other in backends.names if other != name and other not in refusals]
    lines = [f"{name}" + (f", then {', '.join(others)}" if others else "")]
    return "\n".join(lines + [f"not {other}: {reason}" for other, reason in refusals.items()])


def _kda(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A chunk of a head of 128 in bf16, with the bounded gate."""
    import torch

    from perilune.ops import BoundedGate

    q = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16, device=device)
    gate = BoundedGate(torch.zeros(1, device=device), torch.zeros(1, 128, device=device))
    return (q, q, q, q, q[..., 0]), {"initial_state": None, "gate": gate, "normalize_qk": True}


def _kda_decode(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A token in bf16, for a head of 128."""
    import torch

    from perilune.ops import BoundedGate, KdaPool, KdaWeights

    z = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    gate = BoundedGate(torch.zeros(1, device=device), torch.zeros(1, 128, device=device))
    weights = KdaWeights(torch.zeros(384, 4, device=device), gate, torch.ones(128, device=device))
    pool = KdaPool.zeros(1, 1, 128, 128, dtype=torch.bfloat16, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    return (z.new_zeros(1, 1, 384), z, z[..., 0], z, pool, slots, weights, False, None), {}


def _attn_res(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A few tokens and two sources in bf16."""
    import torch

    x = torch.zeros(4, 128, dtype=torch.bfloat16, device=device)
    return (x[0], [x, x], x[0], 1e-5, None, 1e-5, x.dtype), {}


def _attn_res_stored(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A source in float8 and a whole one."""
    from perilune.ops import Stored, store_source

    query, (x, _), *rest = _attn_res(device)[0]
    return (query, [store_source(x, "float8"), Stored(x)], *rest), {}


def _attn_res_bank(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    query, sources, *_ = _attn_res(device)[0]
    return (query[None], sources, query[None]), {"eps": 1e-5}


def _attn_res_merge(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    query, (x, _), *_ = _attn_res(device)[0]
    o = x.float()
    options = {"eps": 1e-5, "update": x, "norm_weight": query, "norm_eps": 1e-5}
    return (o[:, 0], o[:, 0], o, query, x, query), options


def _short_conv(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A few tokens in bf16, four taps."""
    import torch

    x = torch.zeros(1, 4, 128, dtype=torch.bfloat16, device=device)
    return (x, torch.zeros(128, 4, device=device), None, None, "silu", False), {}


def _grouped_experts(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A token through one of two experts, in bf16."""
    import torch

    w = torch.zeros(2, 128, 128, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    return (w[0, :1], w, w, w, ids, ids.float()), {}


def _situ_glu(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, _ = _swiglu(device)
    return (*args, 4.0, 25.0), {}


def _swiglu(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A few tokens in bf16."""
    import torch

    x = torch.zeros(4, 128, dtype=torch.bfloat16, device=device)
    return (x, x), {}


def _rms_norm(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x, _), _ = _swiglu(device)
    return (x, x[0], 1e-5, x.dtype), {}


def _gated_rms_norm(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x, _), _ = _swiglu(device)
    return (x, x[0], x, 1e-5), {}


def _score_histogram(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Scores of two experts."""
    import torch

    return (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, 2, device=device), torch.zeros(2), 1, None, None), {}


def _quantile_bias(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same, by their histogram."""
    args, _ = _score_histogram(device)
    return args[1:4], {"mask": None, "bins": 1000, "groups": None}


def _linear_cross_entropy(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A token and two words, in bf16."""
    import torch

    weight = torch.zeros(2, 128, dtype=torch.bfloat16, device=device)
    return (weight[:1], weight, torch.zeros(1, dtype=torch.long, device=device), -100), {}


def _wide_linear(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The scores of two experts for a few hundred tokens in bf16, by float32 weights."""
    import torch

    return (torch.zeros(512, 128, dtype=torch.bfloat16, device=device), torch.zeros(2, 128, device=device)), {}


def _stable_topk(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The better of two experts."""
    import torch

    return (torch.zeros(1, 2, device=device), 1), {}


def _route(device: "torch.device") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same, and its weight."""
    (scores, k), _ = _stable_topk(device)
    return (scores, scores[0], k, True, 1.0, None), {}


USUAL: "dict[str, Callable[[torch.device], tuple[tuple[Any, ...], dict[str, Any]]]]" = {
    "attn_res": _attn_res,
    "attn_res_stored": _attn_res_stored,
    "attn_res_bank": _attn_res_bank,
    "attn_res_merge": _attn_res_merge,
    "gated_rms_norm": _gated_rms_norm,
    "grouped_experts": _grouped_experts,
    "kda": _kda,
    "kda_decode": _kda_decode,
    "linear_cross_entropy": _linear_cross_entropy,
    "rms_norm": _rms_norm,
    "score_histogram": _score_histogram,
    "sigmoid_glu": _swiglu,
    "situ_glu": _situ_glu,
    "swiglu": _swiglu,
    "quantile_bias": _quantile_bias,
    "route": _route,
    "stable_topk": _stable_topk,
    "wide_linear": _wide_linear,
    "short_conv": _short_conv,
}
"""Arguments of a usual call, of operations whose choice depends on them."""
