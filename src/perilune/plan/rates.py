"""How much of what a GPU could do, our kernels do: measured shares and times, each with its source.

Measured on one H200 (docs/log.md, entries of 2026-11-30); other GPUs are taken to reach the same shares.
"""

H200_BANDWIDTH = 4.8e12  # of which the measured times below had the use

PRODUCTS = 792 / 989
"""Of the peak: 8192^3 by cuBLAS in bfloat16 ("many small experts on Hopper").  Narrow products reach less."""
EXPERTS = 341 / 989
"""Of the peak: the routed experts' products, forward and backward, 896 experts of about 146 rows ("everything on one
H200"; 128 experts: 426 / 989)."""
ATTENTION = 0.35
"""Of the peak: FlashAttention-2 on Hopper, as the FlashAttention-3 paper measured it.  Not measured here."""
ATTENTION_BACKWARD = 2.5
"""Products of attention's backward pass for one of the forward's: scores again, and four gradients of two products."""

STREAM = 4.3 / 4.8
"""Of the memory's bandwidth: a copy on an H200 ("KDA kernels on one H200")."""
MIX = 0.273 / 0.284
"""Of that, attention residuals forward, nine sources of 8192 x 7168 ("everything on one H200")."""
UNMIX = 0.519 / 0.830
"""Of that, their backward: 19 such tensors in 0.830 ms."""

KDA_FORWARD = 1.11e-3 / (8192 * 96)
"""Seconds for a token of a head of 128, forward ("everything on one H200")."""
KDA_BOTH = 10.7e-3 / (65536 * 32)
"""The same, forward and backward; of (1, 8192, 96) and (8, 4096, 16) 0.93 and 0.95 times that."""
KDA_QUEUED = 1.4e-3
"""Seconds that the host takes to queue a KDA layer's forward and backward, at least (the same entry, "The host")."""

FILLED = 0.9
"""Of the memory, what a plan fills: the rest is CUDA's, NCCL's and lost between blocks.  An assumption."""
