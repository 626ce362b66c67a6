"""SiTU-GLU, the gated unit whose two branches are smoothly capped, and SwiGLU, its limit without caps."""

from perilune.ops.situ_glu.api import situ_glu, swiglu

__all__ = ["situ_glu", "swiglu"]
