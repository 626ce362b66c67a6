"""Checks and times the kernels of attention residuals on a GPU, in one go: `python benchmarks/attn_res_on_gpu.py`.

The tests first; nothing is timed if one fails.  Then each pass alone under several plans (elements a thread, sources
under way), the accumulating backward, the two phases, and `perilune bench attn_res`.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from perilune.bench import runner
from perilune.bench.cases.attn_res import Sources
from perilune.bench.meter import Meter
from perilune.bench.operation import BYTES_PER_MS
from perilune.ops import attn_res_bank, attn_res_merge
from perilune.ops.attn_res.kernels import launch

ROOT = Path(__file__).parents[1]
SHAPES = (Sources(9, 8192, 7168), Sources(9, 32768, 2048), Sources(9, 65536, 1024))
EPS = 1e-5


def report(what: str, call: Callable[[], object], bytes_moved: float) -> None:
    ms, floor = Meter().median_ms(call), bytes_moved / BYTES_PER_MS
    Console().print(f"{what:56} {ms:8.3f} ms, floor {floor:6.3f}, ratio {ms / floor:5.2f}", soft_wrap=True)


def passes(shape: Sources) -> None:
    """Both passes with AHEAD and WARPS as they are and as they might be."""
    N, R, D = shape.N, shape.R, shape.D
    leaves, _, dout = shape.make(torch.device("cuda"))
    assert dout is not None
    query, key_weight, *sources = (x.detach() for x in leaves)
    kept = torch.empty(2, R, N, device="cuda")
    gradients = [torch.empty_like(x) for x in sources]
    size = R * D * 2
    plain = (launch.AHEAD, launch.WARPS)
    for ahead, warps in (plain, (2, 8), (3, 8), (6, 8), (12, 8)):
        launch.AHEAD, launch.WARPS = ahead, warps
        name = f"N {N}, R {R}, D {D}; ahead {ahead}, warps {warps}"
        mix = partial(launch.mix, query, sources, key_weight, EPS, None, EPS, kept)
        report(f"{name}: forward", mix, (N + 1) * size)
        unmix = partial(launch.unmix, query, sources, key_weight, None, EPS, kept, dout, gradients)
        report(f"{name}: backward", partial(unmix, [False] * N), (2 * N + 1) * size)
        if (ahead, warps) == plain:
            report(f"{name}: backward, adding", partial(unmix, [True] * N), (3 * N + 1) * size)
    launch.AHEAD, launch.WARPS = plain


@torch.no_grad()
def two_phases(R: int, Q: int = 24, N: int = 8, D: int = 7168) -> None:
    query, key_weight, *bank, live = Sources(N + 1, R, D).make(torch.device("cuda")).leaves
    queries, key_weights = (x.expand(Q, D).contiguous() for x in (query, key_weight))
    phase = partial(attn_res_bank, queries, bank, key_weights)
    report(f"bank of {N}, {Q} queries, R {R}: first phase", phase, R * D * (2 * 2 * N + 4 * Q))
    merge = partial(attn_res_merge, phase().of(0), query, live, key_weight, norm_weight=key_weight)
    report(f"R {R}: merge and norm", merge, R * D * 8)


if __name__ == "__main__":
    tests = ["tests/ops/test_attn_res_triton.py", "tests/ops/test_attn_res.py", "tests/ops/test_share_gradient.py"]
    if subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT).returncode:
        sys.exit("a test failed; nothing timed")
    for shape in SHAPES:
        passes(shape)
    for rows in (1, 64, 4096):
        two_phases(rows)
    sys.exit(runner.main(["attn_res"]))
