"""Checks and times a training step of `1b` on a GPU, in one go: `python benchmarks/train_on_gpu.py`.

The tests first; nothing is timed if one fails.  Then Newton-Schulz over the experts of `1b`, in batches of several
sizes, and `perilune bench train`, which says what each operation runs on.  Figures go to `$OUT`, or to this folder.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console

from perilune.bench import runner
from perilune.bench.meter import Meter
from perilune.optim import newton_schulz

ROOT = Path(__file__).parents[1]
EXPERTS = (8448, 320, 320)
FLOPS = 5 * EXPERTS[0] * 6 * 320**3
TESTS = {
    "tests/train/test_waiting.py": "",
    "tests/ops/test_grouped_experts_kernels.py": "kernels_are_the_reference",
}


def iterations() -> None:
    """In how large batches the iteration is quickest: all at once, or few enough for the second-level cache."""
    blocks = torch.randn(EXPERTS, device="cuda").bfloat16()
    plain = newton_schulz.DEVICE_BATCH
    for size in (plain, 2**25, 2**23, 2**22):
        newton_schulz.DEVICE_BATCH = size
        ms = Meter().median_ms(lambda: newton_schulz.newton_schulz(blocks, dtype=torch.bfloat16))
        batch = min(size // 320**2, EXPERTS[0])
        Console().print(f"Newton-Schulz, {EXPERTS}, {batch} at a time: {ms:.1f} ms, {FLOPS / ms / 1e9:.0f} TFLOP/s")
    newton_schulz.DEVICE_BATCH = plain


if __name__ == "__main__":
    for file, chosen in TESTS.items():
        command = [sys.executable, "-m", "pytest", "-q", file, "-k", chosen]
        if subprocess.run(command, cwd=ROOT).returncode:
            sys.exit("a test failed; nothing timed")
    iterations()
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    out = Path(os.environ.get("OUT", ".")) / "train-h200.json"
    sys.exit(runner.main(["train"], json_path=out))
