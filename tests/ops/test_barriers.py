"""Barriers of every kernel in Gluon, read from what a compiler makes of it for Hopper: their memory is theirs alone.

A barrier's memory with other numbers in it is harmless until a GPU is shared, so no test of results would notice.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sm_90 import BF16, F32, I32, I64, Room, shared_memory, stages

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from perilune.ops.barriers import barriers, retire
from perilune.ops.grouped_experts.kernels import launch as experts
from perilune.ops.grouped_experts.kernels import products
from perilune.ops.kda.kernels import grads_hopper, launch_hopper, prepare_hopper, scan_hopper

pytestmark = pytest.mark.slow

Form = tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]  # kernel, types, constants, options


def block(rows: int, columns: int, of: str = "bf16") -> str:
    """The type of a descriptor, laid out as `laid_out` does it."""
    wide = launch_hopper.VECTOR.value if rows == 1 else launch_hopper.WIDE
    return f"tensordesc<{of}[{rows}, {columns}],{launch_hopper.TILE.value if of == 'bf16' else wide!r}>"


def each(names: str, of: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), of)


RECORDS = {"keys": block(64, 128), "squares": block(64, 64)}
RECORDS |= {"retained": block(1, 128, "fp32"), "scales": block(1, 64, "fp32")}
PLACES = {"starts": I64, "lengths": I32, "segments": I32, **each("H V records", "i32")}
PLAN = {"starts": I64, "lengths": I32, **each("scale g_min middle", "fp32"), **each("H stride", "i32")}


def scan(output: bool, keep: bool, groups: int) -> Form:
    types = {"v": block(64, 64), "initial": F32, "final": F32, **RECORDS, **PLACES}
    if output:
        types |= {"o_pointer": BF16, "o": block(64, 64)}
    if keep:
        types |= {"residuals": block(64, 64), "states": block(64, 128)}
    maps = not output and not keep
    if maps:
        types["maps"] = F32
    flags = {"OUTPUT": output, "KEEP": keep, "MAPS": maps, "GROUPS": groups}
    return scan_hopper.scan_hopper_kernel.kernel, types, flags | launch_hopper.SCAN[output, keep], {"num_warps": 4}


def reverse_scan(keep: bool, groups: int) -> Form:
    types = {"do": block(64, 64), "dfinal": F32, "dinitial": F32, **RECORDS, **PLACES}
    if keep:
        types |= {"dz": block(64, 64), "dstates": block(64, 128)}
    flags = {"KEEP": keep, "GROUPS": groups}
    return scan_hopper.reverse_scan_hopper_kernel.kernel, types, flags | launch_hopper.REVERSE[keep], {"num_warps": 4}


def prepare() -> Form:
    types = {**each("q k z", block(64, 128)), **each("beta q_since k_since k_until solve pairs", BF16), **PLAN}
    types |= each("A_log dt_bias retained own strength q_norm k_norm", F32)
    flags = {"K": 128, "NORM": True, "BETA_LOGITS": True}
    return prepare_hopper.prepare_hopper_kernel.kernel, types, flags, {"num_warps": 8}


def key_grads() -> Form:
    types = {**each("q k z", block(64, 64)), **each("do residuals dz_", block(64, 128)), **each("dq dk dz", BF16)}
    types |= each("states dstates dpairs", block(128, 64)) | PLAN
    types |= each("A_log dt_bias q_norm k_norm down along_q along_k dbias drate", F32)
    flags = {"K": 128, "NORM": True}
    return grads_hopper.key_grads_hopper_kernel.kernel, types, flags, launch_hopper.KEY_GRADS


def row_product(gated: bool, turned: bool) -> Form:
    types = {"x": block(64, 64), "out": BF16, **each("experts firsts limits number", I32), **each("N K", "i32")}
    types |= each("beta_gate beta_up", "fp32")
    types |= each("first_matrix second_matrix", block(64, 128) if turned else block(128, 64))
    types |= each("gates ups", BF16) if gated else {}
    flags = {"GATED": gated, "SITU": gated, "KEEP": gated, "TURNED": turned, "DOUBLE": turned}
    return products.row_product_kernel, types, flags | {"STAGES": experts.STAGES}, {"num_warps": 4}


def outer_product() -> Form:
    types = {"left": block(64, 64), **each("right first_out second_out", block(64, 256))}
    types |= {"starts": I32, **each("E M N run", "i32")}
    return products.outer_product_kernel, types, {"DOUBLE": True, **experts.OUTER}, {"num_warps": 4}


FORMS: dict[str, Callable[[], Form]] = {
    "scan": lambda: scan(True, False, 2),
    "scan that keeps": lambda: scan(False, True, 1),
    "scan for maps": lambda: scan(False, False, 2),
    "reverse scan": lambda: reverse_scan(False, 1),
    "reverse scan that keeps": lambda: reverse_scan(True, 2),
    "records": prepare,
    "gradients of keys": key_grads,
    "gated products": lambda: row_product(True, False),
    "turned products": lambda: row_product(False, True),
    "outer products": outer_product,
}


def compiled(kernel: Any, types: dict[str, str], flags: dict[str, Any], options: dict[str, int]) -> dict[str, str]:
    """All else that it takes is None."""
    nothing = dict.fromkeys(name for name in kernel.arg_names if name not in types and name not in flags)
    return stages(kernel, types, nothing | flags, **options)


def taken(ttgir: str) -> tuple[int, list[tuple[Room, Room]]]:
    """How many barriers there are, and who has some of their memory as well."""
    rooms = shared_memory(ttgir)
    ours = [room for room in rooms if re.search(r"memdesc<\d+x1xi64,", room.of)]
    shared = [(one, other) for one in ours for other in rooms if other is not one and one.meets(other)]
    return sum(room.end - room.start for room in ours) // 8, shared


@pytest.mark.parametrize("name", FORMS)
def test_barriers_are_given_up_at_the_end_and_nothing_else_has_their_memory(name: str) -> None:
    kernel, types, flags, options = FORMS[name]()
    code = compiled(kernel, types, flags, options)
    made, given_up = (code["ptx"].count(f"mbarrier.{what}.shared") for what in ("init", "inval"))
    expected = sum(
        int(n) if n.isdecimal() else flags[n] for n in re.findall(r"= barriers\((\w+), ", inspect.getsource(kernel.fn))
    )
    assert made == given_up == expected > 0
    assert taken(code["ttgir"]) == (expected, [])


@gluon.jit
def one_after_the_other_kernel(out, RETIRED: gl.constexpr):
    """Numbers pass through shared memory when nobody waits for a barrier any more."""
    bars = barriers(1, 1)
    mbarrier.arrive(bars.index(0))
    mbarrier.wait(bars.index(0), 0)
    gl.thread_barrier()
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rest = gl.arange(0, 128, line)
    room = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]), rest)
    gl.store(out + rest, room.load(line))
    if RETIRED:
        retire(bars, 1)


@pytest.mark.parametrize("retired", [True, False])
def test_memory_given_away_is_seen(retired: bool) -> None:
    """A barrier that nobody retires loses its memory to the numbers behind it."""
    code = compiled(one_after_the_other_kernel, {"out": I32}, {"RETIRED": retired}, {"num_warps": 4})
    number, shared = taken(code["ttgir"])
    assert number == 1
    assert bool(shared) != retired
    assert code["ptx"].count("mbarrier.inval.shared") == retired


def test_every_kernel_with_barriers_is_looked_at() -> None:
    here = {(Path(inspect.getsourcefile(form()[0].fn)), form()[0].fn.__name__) for form in FORMS.values()}
    found = set()
    for file in Path(inspect.getsourcefile(retire.fn)).parent.rglob("*.py"):
        for kernel in re.split(r"^(?=@|def )", file.read_text(), flags=re.M):
            if "= barriers(" in kernel:
                found.add((file, re.search(r"def (\w+)", kernel)[1]))
    assert here == found
