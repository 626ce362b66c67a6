"""Compiles kernels for Hopper on any machine: what a compiler did can be read without a GPU."""

from typing import Any

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
