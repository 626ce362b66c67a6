"""Compiles kernels for Hopper on any machine: what a compiler did can be read without a GPU."""

import re
from math import prod
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

BF16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"


def assembly(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    """The PTX of a kernel of Triton or Gluon; types and constants: of its arguments, by name."""
    return stages(kernel, types, constants, **options)["ptx"]


def stages(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> dict[str, str]:
    """What a compiler makes of it in turn: "ttir", "ttgir", "llir", "ptx"; arguments as above."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, x in types.items() if x.startswith("*")}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(kernel, signature, constexprs=values, attrs=aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


class Room(NamedTuple):
    """Bytes of shared memory, and the operation that has them."""

    start: int
    end: int
    of: str

    def meets(self, other: "Room") -> bool:
        return self.start < other.end and other.start < self.end


def shared_memory(ttgir: str) -> list[Room]:
    """Who has what of it, in order of the code, as a compiler divides it.

    Operations that need some while they run are taken to need as many bytes as their operand has.
    """
    from triton._C.libtriton import ir, nvidia, passes

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    manager = ir.pass_manager(context)  # the first passes of those from here to PTX
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 80)
    manager.run(module, "shared_memory")
    text = str(module)
    whole = int(re.search(r"ttg\.shared = (\d+)", text)[1])
    lines = [line.strip() for line in text.splitlines()]
    rooms = []
    for i, line in enumerate(lines):
        if (found := re.search(r"allocation\.offset = (\d+)", line)) is None:
            continue
        start, types = int(found[1]), line.rsplit(" : ", 1)[-1]
        if line.startswith("tt.func"):  # how waiting warps are told what to do
            end = whole
        elif line.startswith("ttg.warp_specialize"):  # what they are handed; types follow their code
            types = next(x for x in lines[i:] if x.startswith("} : ("))
            end = start + sum(map(handed, re.findall(TYPES, types)))
        else:
            end = start + bytes_of(types.split(" -> ")["local_alloc" in line])
        rooms.append(Room(start, end, line))
    return rooms


TYPES = r"!ttg\.memdesc<[^>]*>|!tt\.tensordesc<tensor<[^>]*>>|!tt\.ptr<[^>]*>|\b[if]\d+\b"


def bytes_of(kind: str) -> int:
    """Of the first tensor in a type: tensor<4x64xbf16, ...> or !ttg.memdesc<...>"""
    sizes, bits = re.search(r"<((?:\d+x)+)b?[if](\d+)\b", kind).groups()
    return prod(map(int, sizes[:-1].split("x"))) * int(bits) // 8


def handed(kind: str) -> int:
    """Bytes of a number, of an address in memory, or of one in shared memory with a place in every direction."""
    if "memdesc" in kind:
        return 4 * (1 + re.search(r"<((?:\d+x)+)", kind)[1].count("x"))
    return 8 if kind.startswith("!") else int(kind[1:]) // 8
