"""The decay gates as device functions, in units of log2: exp2 is what the hardware has."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NONE, BOUNDED, SOFTPLUS = 0, 1, 2
_BOUNDED, _SOFTPLUS = tl.constexpr(BOUNDED), tl.constexpr(SOFTPLUS)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def softplus(x):
    e = tl.exp2(-tl.abs(x) * LOG2E)
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))  # exact where e drowns in 1
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def log2_decay(z, rate, bias, g_min, GATE: tl.constexpr):
    """What a token retains of each channel, as a base-2 logarithm <= 0: z logits, or natural logarithms as they are."""
    if GATE == _BOUNDED:
        g = g_min * sigmoid(rate * (z + bias))
    elif GATE == _SOFTPLUS:
        g = -rate * softplus(z + bias)
    else:
        g = z
    return g * LOG2E


@triton.jit
def gate_backward(z, rate, bias, g_min, dg, GATE: tl.constexpr):
    """(gradient of z and of the bias, gradient of A_log), by element; dg: of the natural logarithm."""
    if GATE == _BOUNDED:
        x = rate * (z + bias)
        dz = dg * g_min * rate * sigmoid(x) * sigmoid(-x)  # not s (1 - s), which cancels
        return dz, dz * (z + bias)
    elif GATE == _SOFTPLUS:
        dz = -dg * rate * sigmoid(z + bias)
        return dz, -dg * rate * softplus(z + bias)
    else:
        return dg, tl.zeros_like(dg)
