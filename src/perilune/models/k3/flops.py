"""How many floating-point operations a K3-class model needs for a token: by formula, from the configuration alone.

A product of [m, k] and [k, n] counts 2 m k n, and nothing else counts: no norm, gate, convolution, softmax or sort.  A
training step takes three times the forward, each product having two in the backward.  What a kernel does beyond that,
as recomputing, padding, inverting a chunk's triangle, or products above the causal diagonal, is its own affair.
"""

from dataclasses import asdict, dataclass

from perilune.models.k3.config import K3Config

TRAINING = 3  # forwards: one, and a backward of two


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """Of a token's forward pass, mean over the positions of a document, summed over layers."""

    projections: float
    """Into and out of attention of both kinds, gates and low ranks included."""
    kda: float
    """The recurrence itself: k^T S, k u^T and q^T S, 6 K V for each head, whatever chunks a kernel works in."""
    attention: float
    """MLA's q k^T and p v: 2 (qk + v) for each head and each of the (T + 1) / 2 keys that a query sees on average."""
    router: float
    experts: float
    """The routed ones, with the projections to their width and back."""
    shared: float
    """Experts that every token takes, and dense feed-forward blocks."""
    attn_res: float
    """Scores and mixture of N sources, 4 N D; a single source is not scored."""
    head: float
    """Logits; those of the further tokens too (multi-token prediction)."""

    @property
    def forward(self) -> float:
        return sum(asdict(self).values())

    @property
    def training(self) -> float:
        """Forward and backward."""
        return TRAINING * self.forward


def token_flops(config: K3Config, context: int) -> TokenFlops:
    """The operations for a token of a document of `context` tokens, the layers of multi-token prediction included."""
    kinds = [config.attention(i) for i in range(config.num_hidden_layers)]
    moes = [config.is_moe(i) for i in range(config.num_hidden_layers)]
    further = config.num_nextn_predict_layers
    kinds += ["mla"] * further
    moes += [config.num_experts > 0] * further
    number = {kind: kinds.count(kind) for kind in ("kda", "mla")}
    sparse, dense = sum(moes), len(moes) - sum(moes)
    d, linear = config.hidden_size, config.linear_attn_config
    shared = config.num_shared_experts * config.moe_intermediate_size
    qk = config.qk_nope_head_dim + config.qk_rope_head_dim
    joined = 2 * 2 * d * d * further  # eh_proj
    return TokenFlops(
        projections=number["kda"] * _kda_projections(config) + number["mla"] * _mla_projections(config) + joined,
        kda=number["kda"] * linear.num_heads * 6 * linear.head_dim**2,
        attention=number["mla"] * config.num_attention_heads * (qk + config.v_head_dim) * (context + 1),
        router=sparse * 2 * d * config.num_experts,
        experts=sparse * _experts(config),
        shared=6 * d * (sparse * shared + dense * config.intermediate_size),
        attn_res=_attn_res(config),
        head=2 * d * config.vocab_size * (1 + further),
    )


def _kda_projections(config: K3Config) -> int:
    d, linear = config.hidden_size, config.linear_attn_config
    rank, width = linear.head_dim, linear.num_heads * linear.head_dim
    gate = d * width if linear.use_full_rank_gate else rank * (d + width)
    return 2 * (4 * d * width + rank * (d + width) + d * linear.num_heads + gate)  # q, k, v, o; decay; strength; gate


def _mla_projections(config: K3Config) -> int:
    d, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    values = heads * config.v_head_dim
    q = d * queries if rank is None else rank * (d + queries)
    kv_a = d * (config.kv_lora_rank + config.qk_rope_head_dim)
    kv_b = config.kv_lora_rank * (heads * config.qk_nope_head_dim + values)
    return 2 * (q + kv_a + kv_b + d * values * (2 if config.mla_use_output_gate else 1))


def _experts(config: K3Config) -> int:
    latent = config.routed_expert_hidden_size
    width = config.hidden_size if latent is None else latent
    around = 0 if latent is None else 2 * 2 * config.hidden_size * latent
    return config.num_experts_per_token * 6 * width * config.moe_intermediate_size + around


def _attn_res(config: K3Config) -> int:
    period = config.residual_period
    if period is None:
        return 0
    sources = [1 + -(-reads // period) for reads in range(2 * config.num_hidden_layers + 1)]
    return sum(4 * n * config.hidden_size for n in sources if n > 1)
