"""Exactly balanced expert parallelism: which rank computes how many rows of which expert (K3 report, MoonEP).

R ranks have E / R experts each at home.  Every rank sends S K rows, and every rank is to compute S K, whatever the
router does; where a rank's own experts have too few, it takes rows of another rank's, with a copy of their weights.
"""

from collections.abc import Sequence

from perilune.core.errors import ShapeError


def place(loads: Sequence[int], ranks: int) -> list[dict[int, int]]:
    """For every rank, the rows it computes of each expert: the same number in all on every rank.

    A rank below the mean takes what it lacks from one rank above, of the largest first; it is then exact and left
    alone.  So every rank has rows of one other rank at most, copies of at most E / R experts
    beside its own (`copies`), and no more than R - 1 ranks take anything.  The least that the worst case asks for is
    ceil(E (R - 1) / R^2) on some rank: one rank whose experts get nothing, the others' alike.

    loads: [E] rows of every expert, of all ranks together; rank r has experts r E / R up to (r + 1) E / R at home.
    The same loads give the same plan on every rank.  Raises ShapeError where experts or rows do not divide by ranks.
    """
    if ranks < 1 or len(loads) % ranks:
        raise ShapeError(f"ranks: expected a divisor of {len(loads)} experts, got {ranks}; spread them evenly")
    if min(loads, default=0) < 0 or sum(loads) % ranks:
        raise ShapeError(f"loads: expected rows >= 0 that divide by {ranks} ranks, got {sum(loads)}; send equally many")
    home, target = len(loads) // ranks, sum(loads) // ranks
    placed = [{e: loads[e] for e in range(r * home, (r + 1) * home) if loads[e]} for r in range(ranks)]
    have = [sum(rows.values()) for rows in placed]
    filled: set[int] = set()
    while (taker := next((r for r in range(ranks) if have[r] < target), None)) is not None:
        giver = max(range(ranks), key=lambda r: (have[r], -r))
        assert have[giver] > target
        assert giver not in filled, "a filled rank is exact"
        _move(placed[giver], placed[taker], target - have[taker])
        have[giver] -= target - have[taker]
        have[taker] = target
        filled.add(taker)
    return placed


def _move(giver: dict[int, int], taker: dict[int, int], rows: int) -> None:
    """That many rows, of the largest experts first, so that few are copied: all of each but of the last."""
    for expert in sorted(giver, key=lambda e: (-giver[e], e)):
        moved = min(rows, giver[expert])
        if moved:
            taker[expert] = moved
            giver[expert] -= moved
            rows -= moved
        if not giver[expert]:
            del giver[expert]


def copies(placed: Sequence[dict[int, int]], experts: int) -> list[list[int]]:
    """For every rank, the experts of other ranks that it computes rows of, in their order."""
    home = experts // len(placed)
    return [sorted(e for e in rows if e // home != r) for r, rows in enumerate(placed)]
