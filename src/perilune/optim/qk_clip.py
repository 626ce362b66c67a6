"""Weight clipping that bounds attention logits."""

import torch
from torch import Tensor

from perilune.core.errors import ShapeError
from perilune.optim.sharded import is_sharded, local, shard_of, sharding


@torch.no_grad()
def qk_clip_(
    q_weight: Tensor,
    kv_b_weight: Tensor,
    max_logits: Tensor,
    *,
    threshold: float = 100.0,
    nope: int,
    rope: int,
    v: int,
) -> Tensor:
    """Scales the logits of every head whose largest exceeded `threshold` by gamma = threshold / max_logits, in place.

    The K2 report's QK-clip for multi-head latent attention.  Of such a head the `nope` rows of q and of k take
    sqrt(gamma) each, the `rope` rows of q take gamma: their key is shared by all heads and stays.  Value rows stay,
    and heads within the threshold keep every bit.  For use after the optimiser step.

    q_weight: [H * (nope + rope), r], rows head by head, nope before rope (q_b_proj, or q_proj without a low rank).
    kv_b_weight: [H * (nope + v), r], rows head by head, keys before values.
        Both may be DTensors sharded along their rows.
    max_logits: [H], the step's largest q.k * scale of each head over all ranks and tokens (-inf if it saw none).
    Returns gamma [H], 1 where nothing was clipped.  Raises ShapeError; for an infinite or NaN logit on the CPU only:
    elsewhere a look at it would wait for the device, and the head is left alone.
    """
    heads = max_logits.numel()
    for name, weight, per_head in (("q_weight", q_weight, nope + rope), ("kv_b_weight", kv_b_weight, nope + v)):
        if weight.dim() != 2 or weight.shape[0] != heads * per_head:
            raise ShapeError(
                f"{name}: expected {heads} heads x {per_head} = {heads * per_head} rows, got {list(weight.shape)}; "
                "give one max_logits entry a head and the model's head widths"
            )
    if not threshold > 0:
        raise ShapeError(f"threshold: expected > 0, got {threshold}; the K2 report uses 100")
    if max_logits.device.type == "cpu" and not bool((max_logits < torch.inf).all()):
        raise ShapeError(
            f"max_logits: expected no inf or NaN, got {max_logits.tolist()}; the step diverged, do not apply it"
        )
    wide = max_logits.to(q_weight.device, torch.promote_types(q_weight.dtype, torch.float32)).flatten()
    gamma = torch.where((wide > threshold) & wide.isfinite(), threshold / wide, 1.0)
    root = gamma.sqrt()
    _scale_rows_(q_weight, torch.cat([root[:, None].expand(-1, nope), gamma[:, None].expand(-1, rope)], 1))
    _scale_rows_(kv_b_weight, torch.cat([root[:, None].expand(-1, nope), gamma.new_ones(heads, v)], 1))
    return gamma


def _scale_rows_(weight: Tensor, factors: Tensor) -> None:
    """Each row of the weight by its factor [H, rows of a head]; of a DTensor, the rows that are here."""
    rows = factors.flatten()
    if is_sharded(weight) and (cut := sharding(weight)) is not None and cut[0] == 0:
        rows = shard_of(rows, weight, axis=cut[1])
    local(weight).mul_(rows[:, None])
