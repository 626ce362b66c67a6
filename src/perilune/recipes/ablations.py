"""What else a recipe could be, to be compared with what it is: changes as they are typed on the command line."""

ABLATIONS: dict[str, tuple[str, ...]] = {
    "base": (),
    "sign": ("model.balance.kind=sign", 'model.balance.options={"step": 0.01}'),
    "aux": ("model.balance.kind=aux", 'model.balance.options={"coefficient": 0.01}'),
    "plain": ("model.attn_res_block_size=null",),
}
"""The recipe itself (quantile balancing, block attention residuals); balanced by the sign rule, with the step that was
best here; by an auxiliary loss; with the plain residual in place of attention residuals."""
