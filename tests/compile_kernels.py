"""Compiles every Triton kernel for sm_90 without a card; ``python tests/compile_kernels.py``.

The interpreter takes much that the compiler refuses: types that change in a loop, say. Beside each
stand its registers per thread, and what it spills to memory, which none may.
"""

import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lrmoe.kernels import (
    gated_triton,
    pairs_triton,
    rows_triton,
    score_triton,
    select_triton,
)

TARGET = GPUTarget("cuda", 90, 32)
WORDS = {"wide": tl.float32, "tf32": "tf32", "ieee": "ieee"}
# Types of arguments by name; {x} is the dtype of rows, {i} that of row ids, {b} no and yes, {p} the
# precision of products, {k} their block.
TYPES = {
    rows_triton._gather: "rows=*{x} ids=*{i} out=*{x} num_rows=i32 width=i32 ROWS=4 BLOCK=2048",
    rows_triton._fill: "ids=*{i} counts=*i32 places=*i32 num_ids=i32 most=i32 BLOCK=1024",
    rows_triton._sum: (
        "rows=*{x} places=*i32 counts=*i32 out=*{x} width=i32 most=i32 BLOCK=2048 MOST=8 WIDE=wide"
    ),
    rows_triton._norm: "rows=*{x} norm_sq=*fp32 is_bad=*u8 width=i32 BLOCK=2048 WIDE=wide",
    rows_triton._poison: "rows=*{x} flags=*u8 stride=i32 width=i32 BLOCK=2048",
    rows_triton._clear: "products=*{x} ends=*i32 size=i32 PROGRAMS=16 BLOCK=8192",
    gated_triton._forward: (
        "gate_up=*{x} scale=*fp32 scaled=*{x} norm_sq=*fp32 width=i32 BLOCK=1024"
    ),
    gated_triton._backward: (
        "gate_up=*{x} row_ids=*{i} grad_h=*{x} coef=*fp32 grad_gate_up=*{x} scaled=*{x} "
        "inner=*fp32 width=i32 BLOCK=1024"
    ),
    pairs_triton._count: (
        "ids=*{i} counts=*i64 num=i32 num_ids=i32 num_blocks=i32 BLOCK=128 KINDS=32"
    ),
    pairs_triton._place: (
        "ids=*{i} counts=*i64 ends=*i64 order=*i64 ordered=*i64 num=i32 num_ids=i32 "
        "num_blocks=i32 BLOCK=128 OTHERS=32"
    ),
    pairs_triton._scan: (
        "needed=*u8 starts=*i64 tokens=*i64 rows=*i32 num_tokens=i32 num_ranks=i32 total=i32 "
        "BLOCK=2048"
    ),
    pairs_triton._rows: (
        "rows=*i32 tokens=*i64 ranks=*i64 found=*i32 num=i32 num_tokens=i32 BLOCK=1024"
    ),
    pairs_triton._spread: (
        "values=*{i} ends=*i64 spread=*{i} num_runs=i32 num=i32 COUNTS=0 BLOCK=1024"
    ),
    pairs_triton._pack: (
        "kept=*i64 weights=*fp32 ps=*fp32 tokens=*i64 rows=*i32 places=*i32 coefs=*fp32 num=i32 "
        "BLOCK=1024"
    ),
    score_triton._lrm: (
        "ps=*fp32 norms=*fp32 tokens=*i64 h_norms=*fp32 scores=*fp32 num=i32 BLOCK=1024"
    ),
    score_triton._grad_pass: (
        "rows=*{x} first=*{x} others=*{x} norm_sq=*fp32 is_bad=*u8 codes=*i64 num=i32 width=i32 "
        "HAS_ALL={b} PRECISION={p} ROWS=16 BLOCK={k}"
    ),
    score_triton._sums: (
        "lrms=*fp32 kept=*i64 flags=*u8 parts=*fp64 num_pairs=i32 num_kept=i32 num_tokens=i32 "
        "BLOCK=1024"
    ),
    score_triton._signs: "products=*{x} directions=*i64 num=i32 ROWS=16 SIGNS=64",
    select_triton._whole_keys: (
        "keys=*i64 counts=*i64 salts=*i64 wholes=*{i} bits=i32 spare=i32 RUNS=128 BLOCK=2048"
    ),
    select_triton._ranks: (
        "keys=*i64 counts=*i64 salts=*i64 orders=*i64 spare=i32 IS_SHORT={b} RUNS=128 BLOCK=128 "
        "OTHERS=32"
    ),
    select_triton._gray: "directions=*i64 places=*i64 num=i32 BLOCK=1024",
    select_triton._sizes: "scores=*fp32 counts=*i64 sizes=*fp32 rho=fp32 RUNS=128 BLOCK=2048",
    select_triton._sample: (
        "sizes=*fp32 counts=*i64 quotas=*i64 orders=*i64 starts=*i64 drawn=*i64 kept=*i64 "
        "weights=*fp64 RUNS=128 BLOCK=2048"
    ),
    select_triton._chain: (
        "orders=*i64 starts=*i64 lengths=*i64 directions=*i64 results=*i64 LONGEST=256"
    ),
    select_triton._top: ("scores=*fp32 counts=*i64 quotas=*i64 kept=*i64 RUNS=128 BLOCK=2048"),
}
HELPERS = {"_following", "_root", "_units", "_is_capped", "_ends", "_keys", "_num_ones", "_before",
           "_kind", "_mixed", "_bits", "gray_code", "_tied"}  # fmt: skip


def launched_warps(kernel):
    """As its module launches it."""
    if kernel is select_triton._chain:
        return select_triton._CHAIN_WARPS
    if kernel is pairs_triton._scan:
        return pairs_triton._SCAN_WARPS
    of_a_run = ("_whole_keys", "_sizes", "_sample", "_top")
    return select_triton._WARPS if kernel.fn.__name__ in of_a_run else 4


def resources(compiled):
    """Registers per thread and bytes of stack, as the tool beside Triton's assembler says."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))


def main() -> None:
    """Compiles all, says so, and fails on the first that does not."""
    kernels = {
        value
        for module in (rows_triton, gated_triton, pairs_triton, score_triton, select_triton)
        for name, value in inspect.getmembers(module)
        if isinstance(value, triton.JITFunction) and name not in HELPERS
    }
    assert kernels == set(TYPES), "a kernel is missing here"
    for x, i, b, p, k in (
        ("bf16", "i32", 0, "tf32", 128),
        ("fp32", "i64", 1, "ieee", 32),
    ):
        for kernel, types in TYPES.items():
            text = types.format(x=x, i=i, b=b, p=p, k=k)
            signature, constants = {}, {}
            for item in text.split():
                name, value = item.split("=")
                if value in WORDS or value.isdigit():
                    constants[name] = WORDS[value] if value in WORDS else int(value)
                    signature[name] = "constexpr"
                else:
                    signature[name] = value
            # As in a launch: memory that the allocator gives, and whole blocks of a row.
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, (name, kind) in enumerate(signature.items())
                if kind.startswith("*") or name == "width"
            }
            source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
            warps = launched_warps(kernel)
            compiled = triton.compile(source, target=TARGET, options={"num_warps": warps})
            registers, stack = resources(compiled)
            sys.stdout.write(
                f"compiled {kernel.fn.__name__} {text}: {registers} registers, {warps} warps\n"
            )
            assert stack == 0, f"{kernel.fn.__name__} spills {stack} bytes"


if __name__ == "__main__":
    main()
