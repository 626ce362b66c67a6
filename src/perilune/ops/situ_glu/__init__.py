"""SiTU-GLU, the gated unit whose two branches are smoothly capped; SwiGLU, its limit without caps; the plain GLU."""

from perilune.ops.situ_glu.api import sigmoid_glu, situ_glu, swiglu

__all__ = ["sigmoid_glu", "situ_glu", "swiglu"]
