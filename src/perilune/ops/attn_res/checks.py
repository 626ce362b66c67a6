"""What both forms of attention residuals ask of their tensors."""

from collections.abc import Sequence

from torch import Tensor

from perilune.core.errors import ShapeError


def check_sources(sources: Sequence[Tensor]) -> None:
    """Raises ShapeError unless there is at least one source and all have one shape and one floating dtype."""
    if len(sources) == 0:
        raise ShapeError("sources: expected one or more tensors, got none; the first is the embedding")
    first = sources[0]
    if not first.is_floating_point() or first.dim() == 0:
        raise ShapeError(
            f"sources[0]: expected a floating tensor, got {first.dtype} {list(first.shape)}; give [..., D]"
        )
    for i, source in enumerate(sources):
        if source.shape != first.shape or source.dtype != first.dtype:
            raise ShapeError(
                f"sources[{i}]: expected {first.dtype} {list(first.shape)} like sources[0], "
                f"got {source.dtype} {list(source.shape)}; mix sources of one shape and dtype"
            )


def check_vector(name: str, vector: Tensor, source: Tensor) -> None:
    """Raises ShapeError unless `vector` is [D] for a source [..., D]."""
    if vector.shape != source.shape[-1:]:
        raise ShapeError(
            f"{name}: expected [{source.shape[-1]}], the width of the sources, got {list(vector.shape)}; "
            "give one vector for the mixer"
        )
