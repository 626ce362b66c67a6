"""Modules for anybody's model: each stands alone."""

from perilune.nn.attn_res import BlockAttnRes, DepthStream, LowRankBank
from perilune.nn.attn_res_stack import AttnResStack
from perilune.nn.balancer import (
    AuxLossBalancer,
    Balancer,
    BandBalancer,
    QuantileBalancer,
    SignBalancer,
    update_balancers,
)
from perilune.nn.cache import HybridCache, LatentCache, RecurrentCache
from perilune.nn.glu import GLU, SiTUGLU
from perilune.nn.init import initialize_
from perilune.nn.kda import KimiDeltaAttention
from perilune.nn.mla import GatedMLA
from perilune.nn.moe import StableLatentMoE
from perilune.nn.norm import RMSNorm
from perilune.nn.pooling import StatisticsPool

__all__ = [
    "GLU",
    "AttnResStack",
    "AuxLossBalancer",
    "Balancer",
    "BandBalancer",
    "BlockAttnRes",
    "DepthStream",
    "GatedMLA",
    "HybridCache",
    "KimiDeltaAttention",
    "LatentCache",
    "LowRankBank",
    "QuantileBalancer",
    "RMSNorm",
    "RecurrentCache",
    "SiTUGLU",
    "SignBalancer",
    "StableLatentMoE",
    "StatisticsPool",
    "initialize_",
    "update_balancers",
]
