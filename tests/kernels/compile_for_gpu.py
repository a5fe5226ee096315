"""Compiles the GPU's kernels for a Hopper GPU, without one; prints the size of each binary.

Run by test_triton in a process of its own, because there Triton must not interpret.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "kv": "*bf16", "row_ids": "*i64", "slots": "*i64",
    "row_start": "*i32", "table_start": "*i32", "block_ids": "*i32", "kv_len": "*i32",
}  # fmt: skip
FLOATS = ("q", "acc", "max", "sum", "rows")


def type_of(name: str) -> str:
    if name.isupper():
        return "constexpr"
    if name in POINTERS:
        return POINTERS[name]
    is_float = name in FLOATS or name.startswith("other_") or name.endswith("_out")
    return "*fp32" if is_float else "i32"


def compile_kernel(name: str, **constants: object) -> int:
    function = getattr(triton_kernels, name)
    signature = {argument: type_of(argument) for argument in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=HOPPER).asm["cubin"])


if __name__ == "__main__":
    sizes = [
        compile_kernel(
            "_attend", IS_CAUSAL=True, GROUP=3, TILE_ROWS=5, VECTORS=16, DIM=64, STEP=64,
            PRECISION="tf32",
        ),
        compile_kernel("_merge", HAS_ROW_IDS=True, DIM=64),
        compile_kernel("_write", DIM=64),
    ]  # fmt: skip
    print(*sizes)
