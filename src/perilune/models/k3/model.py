"""The K3-class language model."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.core.errors import ConfigError, ShapeError
from perilune.models.k3.config import K3Config, Recompute
from perilune.models.k3.layer import DecoderLayer, MTPLayer
from perilune.models.k3.roles import parameter_roles
from perilune.nn import BlockAttnRes, DepthStream, GatedMLA, HybridCache, RMSNorm, StableLatentMoE, initialize_
from perilune.nn.attn_res import Bank
from perilune.nn.balancer import Balancer
from perilune.nn.norm import GatedHeadNorm
from perilune.nn.recompute import recomputed
from perilune.ops import Stored, linear_cross_entropy
from perilune.ops.autocast import dtype_for_products
from perilune.ops.cross_entropy import IGNORED
from perilune.ops.packing import boundaries
from perilune.ops.shards import gather, place_in
from perilune.ops.upload import on_device
from perilune.optim.roles import Roles


@dataclass
class K3Output:
    """What a forward pass gives."""

    logits: Tensor | None = None
    """[B, T, V]; None where `targets` asked for the loss only."""
    loss: Tensor | None = None
    """The scalar to minimise: next-token loss plus the weighted others."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Its unweighted parts, for the record: `next_token`; `answers` where some were given; `mtp` and `balance` where
    the model has them."""
    cache: HybridCache | None = None
    stream: DepthStream | None = None
    """What the next stage goes on from, and nothing else, where the model is a pipeline's stage before the last."""


class Backbone(nn.Module):
    """Embedding, decoder layers, the last mixer and norm."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        mixers = config.residual_period is not None
        self.period = config.residual_period
        self.bank: Bank | None = config.attn_res_bank
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, config.attention(i), moe=config.is_moe(i), mixers=mixers)
            for i in range(config.num_hidden_layers)
        )
        self.output_attn_res = BlockAttnRes(config.hidden_size, config.rms_norm_eps) if mixers else None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mtp = nn.ModuleList(MTPLayer(config) for _ in range(config.num_nextn_predict_layers))
        self.recompute: Recompute = "none"
        self.stage = range(config.num_hidden_layers)
        """Which layers are here: all, or those of a pipeline's stage (`perilune.models.k3.stages`)."""

    @property
    def ends(self) -> bool:
        """Whether the last layer is here, and what comes after it."""
        return self.stage.stop == len(self.layers)

    def forward(
        self,
        input_ids: Tensor,
        cache: HybridCache | None,
        cu_seqlens: Sequence[int] | None,
        mask: Tensor | None = None,
        group: "dist.ProcessGroup | None" = None,
        stream: DepthStream | None = None,
    ) -> Tensor | DepthStream:
        """The features before the last norm: [B, T] to [B, T, D].  A pipeline's stage takes up the `stream` of the one
        before it; all but the last give theirs."""
        if stream is None:
            if self.stage.start > 0:
                raise ShapeError(
                    f"stream: expected that of the stage which ends before layer {self.stage.start}, got none; "
                    "hand over what it gave for these input_ids"
                )
            stream = DepthStream(self.embed_tokens(input_ids), self.period, self.bank)
        if self.training and self.recompute != "none":
            climb = self._climb if self.recompute != "blocks" else self._climb_by_sublayers
            for first, last in itertools.pairwise(self._stretches()):
                sources = recomputed(climb, first, last, cu_seqlens, mask, group, *stream.handed_over())
                stream = DepthStream.resume(sources, self.period, last, self.bank)
        else:
            for i in self.stage:
                past = None if cache is None else cache.layers[i]
                self.layers[i](stream, cache=past, cu_seqlens=cu_seqlens, mask=mask, group=group)
        return stream.mixed(self.output_attn_res) if self.ends else stream

    def _stretches(self) -> list[int]:
        """Where stretches of sublayers begin that are recomputed together, and the end."""
        block = max(self.period or 1, 2)  # blocks of one sublayer are recomputed as layers
        size = {"sublayers": 1, "layers": 2, "blocks": block}[self.recompute]
        first, last = 2 * self.stage.start, 2 * self.stage.stop
        return [first, *range((first // size + 1) * size, last, size), last]

    def _climb(
        self,
        first: int,
        last: int,
        cu_seqlens: Sequence[int] | None,
        mask: Tensor | None,
        group: "dist.ProcessGroup | None",
        *sources: Tensor | Stored,
    ) -> tuple[Tensor | Stored, ...]:
        """A stream's sources before sublayer `first` to those before sublayer `last`."""
        stream = DepthStream.resume(sources, self.period, first, self.bank)
        for read in range(first, last):
            layer = cast("DecoderLayer", self.layers[read // 2])
            if read % 2 == 0:
                layer.attend(stream, cu_seqlens=cu_seqlens, group=group)
            else:
                layer.feed(stream, mask=mask)
        at_the_end = last == 2 * len(self.layers)  # what the head reads is a live sum, complete or not
        return tuple(stream.sources if at_the_end else stream.handed_over())

    def _climb_by_sublayers(self, first: int, last: int, *arguments: Any) -> tuple[Tensor | Stored, ...]:
        """The same; while it is recomputed, it keeps the live sums and one sublayer whole."""
        *beside, sources = *arguments[:3], arguments[3:]
        for read in range(first, last):
            sources = recomputed(self._climb, read, read + 1, *beside, *sources)
        return sources


class K3Model(nn.Module):
    """A K3-class causal language model (K3 report, section 2).

    >>> from perilune.models.k3 import presets
    >>> model = K3Model(presets.nano())
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 2048])
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draws every parameter anew; also what a model built on the meta device needs after `to_empty(device=...)`."""
        initialize_(self, self.config.initializer_range)
        pad = self.config.carried.get("outer", self.config.carried).get("pad_token_id")
        if pad is not None and 0 <= pad < self.config.vocab_size:
            with torch.no_grad():
                self.model.embed_tokens.weight[pad].zero_()
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        cache: HybridCache | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        answers: Tensor | None = None,
        counts: Mapping[str, Sequence[int]] | None = None,
        group: "dist.ProcessGroup | None" = None,
        mean_over: "dist.ProcessGroup | None" = None,
        padding: int = 0,
        stream: DepthStream | None = None,
    ) -> K3Output:
        """`input_ids: [B, T]`.

        cache: from `new_cache(N)`; the tokens go on where its N sequences stopped, and it is moved forward in place.
        cu_seqlens: [N+1], B is 1: packed documents that do not see each other (with a cache: one for each sequence).
        attention_mask: [B, T], 0 at padding on either side; padding is taken out before the first layer.
        labels: [B, T] aligned with `input_ids`, -100 where nothing is to be learned; shifted here, inside documents.
        targets: [B, T], already shifted: what each position is to predict.  Gives the loss without keeping logits.
        answers: [B, T], beside `targets` and shifted like them: a loss of their own, for a few tokens that matter would
        drown in the mean over all.
        counts: by name of a loss (`next_token`, `answers`; `mtp` one for each layer) over how many targets its mean is
            taken instead of those here: this call is a part of a step, and the losses of its parts add up.
        group: a process group over whose ranks rows are cut, equally and without gaps: everything [B, T] is this rank's
            shard, `cu_seqlens` the boundaries in the whole row.  Every rank calls, and runs its backward pass.
        padding: how many of the whole row's last tokens, documents of their own, only fill it up: no balancer counts
            them.
        mean_over: `group` if left out; or a process group whose ranks have documents of their own, perhaps none: losses
            are means over the targets of all, each rank has its own targets' part, and parts and gradients add up.
        stream: of a pipeline's stage but the first, what the one before it gave for these `input_ids`.
        """
        if input_ids.dim() != 2:
            raise ShapeError(f"input_ids: expected [B, T], got {list(input_ids.shape)}; add a batch axis")
        if labels is not None and targets is not None:
            raise ShapeError("labels: expected labels or targets, got both; labels are shifted, targets are not")
        if answers is not None and targets is None:
            raise ShapeError("answers: expected targets beside them, got none; -100 where there is nothing to predict")
        beside = {"labels": labels, "targets": targets, "answers": answers, "attention_mask": attention_mask}
        for name, value in beside.items():
            if value is not None and value.shape != input_ids.shape:
                raise ShapeError(
                    f"{name}: expected {list(input_ids.shape)}, got {list(value.shape)}; align with input_ids"
                )
        if attention_mask is not None:
            if group is not None or mean_over is not None or padding:
                raise ShapeError(
                    "attention_mask: expected none beside group, mean_over and padding, got one; pack documents instead"
                )
            beside = {"labels": labels, "targets": targets, "answers": answers}
            return self._forward_padded(input_ids, attention_mask.bool(), cache, cu_seqlens, beside, counts)
        if group is not None and cache is not None:
            raise ShapeError("cache: expected none beside group, got both; decode in one process, without a group")
        rank, ranks = (0, 1) if group is None else place_in(group)
        mean_over = group if mean_over is None else mean_over
        (B, T), real = input_ids.shape, None
        cu = boundaries(cu_seqlens, B, T * ranks)
        if padding:
            real = (torch.arange(T, device=input_ids.device) < T * (ranks - rank) - padding).expand(B, T)
        h = self.model(input_ids, cache, cu, real, group, stream)
        if isinstance(h, DepthStream):
            return K3Output(stream=h)
        features = self.model.norm(h, dtype_for_products(h))
        output = K3Output(cache=cache)
        if targets is None:
            output.logits = self.lm_head(features)
        if labels is not None:
            targets = shifted(labels, cu, group)
        if targets is not None:
            known = input_ids if real is None else input_ids.masked_fill(~real, IGNORED)
            losses = self._losses(known, h, features, targets, cu, counts or {}, group, mean_over)
            if answers is not None:
                number = (counts or {}).get("answers", (None,))[0]
                losses["answers"] = self._cross_entropy(features, answers, number, mean_over)
            output.loss = self._total(losses)
            output.losses = {name: loss.detach() for name, loss in losses.items()}
        return output

    def _forward_padded(
        self,
        input_ids: Tensor,
        real: Tensor,
        cache: HybridCache | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        given: dict[str, Tensor | None],
        counts: Mapping[str, Sequence[int]] | None,
    ) -> K3Output:
        """Takes padding out, runs the real tokens as packed documents, and puts logits back where they belong."""
        if cu_seqlens is not None:
            if bool(real.all()):  # a mask that hides nothing changes nothing
                return self(input_ids, cache=cache, cu_seqlens=cu_seqlens, counts=counts, **given)
            raise ShapeError(
                "attention_mask: expected none beside cu_seqlens, got one with padding; pack real tokens only"
            )
        cu = [0, *real.sum(1).cumsum(0).tolist()]
        pack = {name: t[real][None] for name, t in given.items() if t is not None}
        output = self(input_ids[real][None], cache=cache, cu_seqlens=cu, counts=counts, **pack)
        if output.logits is not None:
            logits = output.logits.new_zeros(*input_ids.shape, output.logits.shape[-1])
            output.logits = logits.masked_scatter(real[..., None], output.logits)
        return output

    def _losses(
        self,
        input_ids: Tensor,
        h: Tensor,
        features: Tensor,
        targets: Tensor,
        cu: list[int] | None,
        counts: Mapping[str, Sequence[int]],
        group: "dist.ProcessGroup | None",
        mean_over: "dist.ProcessGroup | None",
    ) -> dict[str, Tensor]:
        number = counts.get("next_token", (None,))[0]
        losses = {"next_token": self._cross_entropy(features, targets, number, mean_over)}
        if self.training and len(self.model.mtp):
            # The token after each: a target, or, where nothing is learned from it, the next input of its document.
            following = torch.where(targets == IGNORED, shifted(input_ids, cu, group), targets)
            further = []
            for layer, number in zip(self.model.mtp, counts.get("mtp") or itertools.repeat(None)):
                known = following != IGNORED
                embedding = self.model.embed_tokens(following.clamp(min=0))
                again = self.model.recompute != "none"
                arguments = (h, embedding, cu, known, group)
                h, features = recomputed(layer, *arguments) if again else layer(*arguments)
                following, targets = shifted(following, cu, group), shifted(targets, cu, group)
                further.append(self._cross_entropy(features, targets, number, mean_over))
            losses["mtp"] = torch.stack(further).mean()
        if self.training:
            balance = [moe.auxiliary_loss for moe in self._moes() if moe.auxiliary_loss is not None]
            if balance:
                losses["balance"] = torch.stack(balance).sum()
        return losses

    def _cross_entropy(
        self, features: Tensor, targets: Tensor, number: int | None, mean_over: "dist.ProcessGroup | None"
    ) -> Tensor:
        """Mean over the targets that are not ignored, on all ranks of a group if one is given, or over that number; 0
        where there are none.  The logits are never held."""
        total = linear_cross_entropy(features.flatten(0, 1), self.lm_head.weight, targets.flatten())
        if number is not None:
            return total / max(number, 1)
        count = (targets != IGNORED).sum()
        if mean_over is not None:
            dist.all_reduce(count, group=mean_over)
        return total / count.clamp(min=1)

    def _total(self, losses: dict[str, Tensor]) -> Tensor:
        config = self.config
        weight = {
            "next_token": 1.0,
            "answers": config.answer_loss_weight,
            "mtp": config.mtp_loss_weight,
            "balance": config.balance_loss_weight,
        }
        return torch.stack([weight[name] * loss for name, loss in losses.items()]).sum()

    def new_cache(self, batch: int) -> HybridCache:
        """An empty cache for `batch` sequences."""
        layers = cast("list[DecoderLayer]", self.model.layers)
        return HybridCache([layer.self_attn.new_cache(batch) for layer in layers])

    # what a trainer needs to reach

    def parameter_roles(self) -> Roles:
        """How each parameter is to be optimised, by name; `.table()` prints."""
        return parameter_roles(self)

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        return (m for m in self.modules() if isinstance(m, DecoderLayer))

    def _moes(self) -> Iterator[StableLatentMoE]:
        return (layer.block_sparse_moe for layer in self._decoder_layers() if layer.block_sparse_moe is not None)

    def balancers(self) -> dict[str, Balancer]:
        """Every MoE layer's balancer by module name; `update_balancers` them after the optimizer's step."""
        return {name: m for name, m in self.named_modules() if isinstance(m, Balancer)}

    def latent_attentions(self) -> dict[str, GatedMLA]:
        """Every MLA layer by module name: what QK-clip watches."""
        return {name: m for name, m in self.named_modules() if isinstance(m, GatedMLA)}

    def recompute_activations(self, unit: Recompute = "sublayers") -> None:
        """Keeps for the backward pass the inputs of every `unit` alone and computes the rest again there.

        "sublayers": attention and feed-forward each, with the mixer before it: of each the live sum that it reads is
            kept, and finished blocks once; in the backward pass one of them is whole at a time.
        "layers": both sublayers together: half as many live sums, and one layer.
        "blocks": the blocks of attention residuals: nothing but their bank.  A block is recomputed keeping its live
            sums, and each sublayer then once more.
        "none": everything is kept.  Gradients are the same to the bit where kernels give the same bits twice.
        """
        if unit not in get_args(Recompute):
            raise ConfigError(f"recompute: expected one of {', '.join(get_args(Recompute))}, got {unit!r}; choose one")
        if unit == "blocks" and self.config.residual_period is None:
            raise ConfigError('recompute: expected no "blocks" in a model without attention residuals; say "layers"')
        self.model.recompute = unit

    def compile_norms(self, **options: Any) -> None:
        """Every norm, with the gate behind it where there is one, in one kernel each way: `torch.compile` with these
        options.  Names of parameters and what is saved stay; results differ by rounding."""
        for module in self.modules():
            if isinstance(module, RMSNorm | GatedHeadNorm):
                module.compile(**options)

    # files

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, dtype: torch.dtype | None = None) -> "K3Model":
        """The model in `folder`, in eval mode: `config.json` and safetensors with the released names."""
        from perilune.models.k3.convert import load

        return load(cls, Path(folder), dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `config.json` and safetensors with the released names into `folder`."""
        from perilune.models.k3.convert import save

        save(self, Path(folder))


def shifted(labels: Tensor, cu: Sequence[int] | None, group: "dist.ProcessGroup | None" = None) -> Tensor:
    """What each position is to predict: the next label of its document, -100 at a document's end.  `[B, T]`.

    group: the ranks over which the rows are cut, whose boundaries `cu` then are.
    """
    if group is not None:
        (rank, ranks), whole = place_in(group), gather(labels, group).transpose(0, 1).flatten(1, 2)
        return shifted(whole, cu).chunk(ranks, 1)[rank]
    if not labels.shape[1]:  # a rank without tokens
        return labels
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if cu is not None:
        ends = [end - 1 for start, end in itertools.pairwise(cu) if end > start]
        targets[:, on_device(torch.tensor(ends, dtype=torch.long), targets.device)] = IGNORED
    return targets
