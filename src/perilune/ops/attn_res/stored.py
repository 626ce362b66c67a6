"""Finished sources in less memory: rounded to bfloat16, or to float8 with a scale a row, or projected to a low rank.

Nobody but a mixer ever sees them whole: each pass reads them a few rows at a time, in float32.  So the graph holds what
is stored, and for every reader two numbers a row and source.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from perilune.core.errors import ConfigError, ShapeError
from perilune.ops import blocks
from perilune.ops.attn_res import reference
from perilune.ops.attn_res.shared import places_of, share_gradient, sums_of
from perilune.ops.attn_res.stacked import derivatives, mixture, put
from perilune.ops.autocast import without_autocast
from perilune.ops.blocks import as_rows
from perilune.ops.first_order import first_order

Form = Literal["bfloat16", "float8"]
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # what it holds
LEAST = torch.finfo(torch.float32).tiny  # of a scale, so that a row of zeros has one


@dataclass(frozen=True)
class Stored:
    """A source [..., D] as a bank keeps it; `attn_res` reads it like any other.

    source: where its gradient goes.  Of a rounded source that is [..., D] in the stream's dtype and without memory, one
        NaN for all elements; of a projected one, what is kept, [..., r].
    kept: [..., D] in bfloat16 or float8_e4m3fn, if it is rounded.
    scale: [..., 1], float32 (float64 of a float64 stream): what float8 is multiplied by.
    up: [r, D], if it is projected.
    """

    source: Tensor
    kept: Tensor | None = None
    scale: Tensor | None = None
    up: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.source.shape if self.up is None else torch.Size((*self.source.shape[:-1], self.up.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        """Of the stream."""
        return self.source.dtype

    @property
    def like(self) -> Tensor:
        """A tensor of its shape, dtype and device, and of no worth."""
        return self.source[..., :1].expand(self.shape)

    @property
    def nbytes(self) -> int:
        """What is kept, matrices that all share left out."""
        if self.kept is None:
            return self.source.nbytes
        return self.kept.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.source, self.kept, self.scale, self.up

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The whole source, [..., D]; in the stream's dtype if no other is named."""
        dtype = dtype or self.dtype
        if self.up is not None:
            wide = torch.promote_types(self.dtype, torch.float32)
            with without_autocast(self.source):
                return (self.source.to(wide) @ self.up.to(wide)).to(dtype)
        if self.kept is None:
            return self.source.to(dtype)
        out: Tensor = _Read.apply(self.source, self.kept, self.scale, dtype)
        return out


def store_source(source: Tensor, form: Form) -> Stored:
    """A source rounded for the bank; readers share one sum of gradients, as behind `share_gradient`.

        "bfloat16":  keeps bfloat16(v)
        "float8":    keeps c = float8_e4m3fn(v / s) and s = max |v| / 448 of the row;  read as c s

    The gradient goes to the source as it is, as if nothing had been rounded.  A row that holds NaN or an infinity is
    read as NaN throughout from float8; one of zeros stays zeros.

    source: [..., D], floating.  One that takes two bytes or less an element is not rounded to bfloat16.
    Raises ConfigError for another form, ShapeError for what is no floating tensor.
    """
    check_form(form)
    if not source.is_floating_point() or source.dim() == 0:
        raise ShapeError(f"source: expected a floating tensor, got {source.dtype} {list(source.shape)}; give [..., D]")
    if form == "bfloat16" and source.element_size() <= 2:
        return Stored(share_gradient(source))
    handle, kept, *scale = _Round.apply(source, form)
    return Stored(share_gradient(handle), kept, *scale)


def project_source(source: Tensor, down: Tensor, up: Tensor) -> Stored:
    """A source at a low rank: z = v down is kept, in v's dtype, and read as z up.

    Gradients are those of the two products, up's included; down's is refused, for it would keep v whole.

    source: [..., D].  down: [D, r].  up: [r, D].  Raises ShapeError for others.
    """
    D = source.shape[-1] if source.dim() else 0
    if down.dim() != 2 or down.shape[0] != D or up.shape != down.shape[::-1]:
        raise ShapeError(
            f"down, up: expected [{D}, r] and [r, {D}], got {list(down.shape)} and {list(up.shape)}; "
            "project to a rank and back"
        )
    if down.requires_grad:
        raise ShapeError("down: expected one that is not learned, got a parameter; learn what reads, `up`")
    return Stored(share_gradient(_Project.apply(source, down)), up=up)


def check_form(form: Any) -> None:
    """Raises ConfigError unless `store_source` has it."""
    if form not in get_args(Form):
        raise ConfigError(f"bank: expected 'bfloat16' or 'float8', got {form!r}; leave it out to keep sources whole")


class _Round(torch.autograd.Function):
    """[..., D] -> where its gradient goes, what is kept, and the scale if there is one."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, form: Form) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        handle = source.new_full((), torch.nan).expand(source.shape)
        if form == "bfloat16":
            kept: tuple[Tensor, ...] = (source.to(torch.bfloat16).contiguous(),)
        else:
            kept = float8(source)
        ctx.mark_non_differentiable(*kept)
        return handle, *kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *rest: None) -> tuple[Tensor | None, None]:
        return grad, None


class _Project(torch.autograd.Function):
    """source [..., D], down [D, r] -> [..., r].  Keeps down."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(down)
        return _product(source, down)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (down,) = ctx.saved_tensors
        return _product(grad, down.T), None


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix in at least float32, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        return (x.to(wide) @ matrix.to(wide)).to(x.dtype)


def float8(source: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] in float8_e4m3fn, and [..., 1] to multiply it by."""
    rows = as_rows(source)
    kept = torch.empty(rows.shape, dtype=FLOAT8, device=source.device)
    scale = rows.new_empty(len(rows), 1, dtype=torch.promote_types(source.dtype, torch.float32))
    for first, last in blocks.row_blocks(rows):
        v = rows[first:last].to(scale.dtype)
        scale[first:last] = s = v.abs().amax(-1, keepdim=True).div_(LARGEST).clamp_(min=LEAST)
        kept[first:last] = (v / s).to(FLOAT8)
    return kept.view(source.shape), scale.view(*source.shape[:-1], 1)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, kept: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.dtype = handle.dtype
        return kept.to(dtype) if scale is None else (kept.to(scale.dtype) * scale).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.to(ctx.dtype), None, None, None


def plain(
    query: Tensor, sources: Sequence[Stored], key_weight: Tensor, eps: float,
    norm_weight: Tensor | None, norm_eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The equation over what is read."""
    wide = torch.promote_types(sources[0].dtype, torch.float32)
    read = [source.read(wide) for source in sources]
    return reference.attn_res(query, read, key_weight, eps, norm_weight, norm_eps, dtype)


def by_rows(
    query: Tensor, sources: Sequence[Stored], key_weight: Tensor, eps: float,
    norm_weight: Tensor | None, norm_eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The same, a few rows at a time in either pass."""
    h = _Mix.apply(query, key_weight, eps, *(x for source in sources for x in source.tensors))
    return reference.normalized(h, norm_weight, norm_eps).to(dtype)


def _sources(tensors: Sequence[Tensor | None]) -> list[Stored]:
    """Out of the `tensors` of each, one after the other."""
    return [Stored(*tensors[i : i + 4]) for i in range(0, len(tensors), 4)]  # type: ignore[arg-type]


def _stacks(sources: Sequence[Stored], compute: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, and the sources in them [N, block, D]."""
    *rest, D = sources[0].shape
    elements = blocks.CPU_BLOCK if sources[0].source.device.type == "cpu" else blocks.DEVICE_BLOCK
    step = max(1, elements // max(1, len(sources) * D))
    for first in range(0, math.prod(rest), step):
        part = slice(first, first + step)
        yield part, torch.stack([_read_rows(source, part, compute) for source in sources])


def _read_rows(source: Stored, part: slice, compute: torch.dtype) -> Tensor:
    if source.kept is None:
        v = as_rows(source.source)[part].to(compute)
        return v if source.up is None else v @ source.up.to(compute)
    v = as_rows(source.kept)[part].to(compute)
    return v if source.scale is None else v * as_rows(source.scale)[part]


class _Mix(torch.autograd.Function):
    """query, key_weight [D], the `tensors` of N sources -> [..., D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key_weight: Tensor, eps: float, *tensors: Tensor | None) -> Tensor:
        sources = _sources(tensors)
        first = sources[0]
        compute = torch.promote_types(first.dtype, torch.float32)
        w = query.to(compute) * key_weight.to(compute)
        score, inverse_rms = w.new_empty(2, len(sources), math.prod(first.shape[:-1])).unbind()  # [N, R] each
        out = torch.empty(first.shape, dtype=first.dtype, device=w.device)
        for part, v in _stacks(sources, compute):
            as_rows(out)[part], score[:, part], inverse_rms[:, part] = mixture(v, w, eps)
        ctx.save_for_backward(query, key_weight, score, inverse_rms, *tensors)
        ctx.sums = sums_of([source.source for source in sources])
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """The derivatives of `chunked.AttnRes`; of z up: dz = dv up^T, dup = z^T dv."""
        query, key_weight, score, inverse_rms, *tensors = ctx.saved_tensors
        sources, compute = _sources(tensors), score.dtype
        w = query.to(compute) * key_weight.to(compute)
        dout, dw = as_rows(dout), torch.zeros_like(w)
        wanted = ctx.needs_input_grad[3:]
        places, adds, dsources = places_of([source.source for source in sources], ctx.sums, wanted[::4])
        dups = [
            torch.zeros_like(source.up, dtype=compute) if want and source.up is not None else None
            for source, want in zip(sources, wanted[3::4])
        ]
        with without_autocast(w):
            for part, v in _stacks(sources, compute):
                more, dv = derivatives(v, dout[part].to(compute), score[:, part], inverse_rms[:, part], w)
                dw += more
                for source, dup, dv_i in zip(sources, dups, dv):
                    if dup is not None:
                        dup += as_rows(source.source)[part].to(compute).T @ dv_i
                through = (
                    dv_i if source.up is None else dv_i @ source.up.to(compute).T for source, dv_i in zip(sources, dv)
                )
                put(list(through), places, adds, part)
        gradients: list[Tensor | None] = []
        for dsource, dup, source in zip(dsources, dups, sources):
            gradients += [dsource, None, None, dup if dup is None or source.up is None else dup.to(source.up.dtype)]
        dquery = (dw * key_weight.to(compute)).to(query.dtype)
        dkey_weight = (dw * query.to(compute)).to(key_weight.dtype)
        return dquery, dkey_weight, None, *gradients
