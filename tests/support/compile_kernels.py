"""Compiles kernels for Hopper without a GPU, and prints what each takes: JSON by name.

Not in Triton's interpreter, so it is a process of its own (tests/ops/test_kernels_compile.py).
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alula.ops.eight_bits import DTYPES
from alula.ops.few_rows_linear import _few_rows
from alula.ops.paged_attention import _merge, _split
from alula.ops.paged_attention_8_bits import HEADROOM, _split_8_bits, assembly
from alula.ops.pieces import Pieces
from alula.ops.rkv_score import _find_last
from alula.ops.select_pages import _choose_pages

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INTEGERS = {"table", "tokens", "live", "position", "ring_size", "budget", "pages", "read"}
WIDE = {"part", "part_lse", "lse", "inverse", "scores"}
STRIDES = {"q_row", "q_head", "table_row", "key_row", "key_head", "value_row", "value_head", "ring_row", "ring_head"}
POINTERS = {"q", "keys", "values", "out", "x", "weight", "new_keys", "new_values", "cos", "sin", "query_norm"} | {
    "key_norm",
    "ring",
    "scales",
    "removed",
}


def type_of(name: str, given: dict[str, str]) -> str:
    if name in given:
        return given[name]
    if name in INTEGERS or name in WIDE:
        return "*i32" if name in INTEGERS else "*fp32"
    return "*bf16" if name in POINTERS else "fp32" if name in ("scale_log2", "threshold") else "i32"


def resources(kernel: Any, constants: dict[str, Any], warps: int, stages: int, **given: Any) -> dict[str, int]:
    """Registers of a thread, bytes of its stack, on which registers are spilled, and conversions of single integers."""
    options = {"num_warps": warps, "num_stages": stages} | {k: given.pop(k) for k in ("maxnreg",) if k in given}
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
            continue
        signature[name] = type_of(name, given)
        if signature[name].startswith("*") or name in STRIDES | {"value_scales", "width", "columns"}:
            attributes[i,] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, values, attributes), GPUTarget("cuda", 90, 32), options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        code = subprocess.run([CUOBJDUMP, "--dump-sass", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return {"registers": int(found[1]), "stack": int(found[2]), "conversions": len(re.findall(r"\bI2F\.", code))}


def main() -> None:
    pieces = Pieces.of(512).constants
    heads = {"GROUP": 2, "HEADS": 8, "DIM": 128, "PAGE": 16}
    narrow = {"GROUP": 3, "HEADS": 3, "DIM": 64, "PAGE": 16}
    split = {"BLOCK_G": 8, "PRECISION": "tf32", "EPSILON": 1e-6, **pieces}
    factor = {"HEADROOM": HEADROOM, "FACTOR": tl.float16}
    apart, appending = ({"NEW": on, "NORM": on, "RING": on} for on in (False, True))
    few = {"BLOCK_N": 64, "BLOCK_K": 64, "BLOCK_M": 64}
    wide, small = heads | split | {"DIM_POW2": 128, "BLOCK_N": 64}, narrow | split | {"DIM_POW2": 64, "BLOCK_N": 32}
    quantised = heads | factor | pieces | {"HALF": 64, "BLOCK_G": 8, "BLOCK_N": 32, "PRECISION": "tf32"}
    int8, fp8 = (quantised | assembly(tl.float16, DTYPES[name]) | {"INT8": name == "int8"} for name in ("int8", "fp8"))
    stored = {"maxnreg": 128, "values": "*i16", "scales": "*u8", "value_scales": "i64"}
    made = {
        "attention": resources(_split, wide | apart, 2, 5),
        "attention that appends": resources(_split, small | appending, 1, 3),
        "merge": resources(_merge, {"GROUP": 2, "DIM": 128, "DIM_POW2": 128, "BLOCK_S": 16, **pieces}, 2, 3),
        "attention, int8": resources(_split_8_bits, int8, 1, 2, keys="*i8", **stored),
        "attention, fp8": resources(_split_8_bits, fp8, 1, 2, keys="*fp8e4nv", **stored),
        "gated product": resources(_few_rows, {"GATED": True, "PARTS": 1, **few}, 4, 6),
        "product in parts": resources(_few_rows, {"GATED": False, "PARTS": 8, **few}, 4, 6, out="*fp32"),
        "scan of R-KV": resources(
            _find_last, {"DIM": 128, "DIM_POW2": 128, "BLOCK_I": 128, "BLOCK_J": 64}, 4, 3, out="*i32", removed="*i64"
        ),
        "choice of pages": resources(
            _choose_pages, {"PAGE": 16, "BLOCK": 2048, "FIRST_PAGES": 1, "LAST_PAGES": 2}, 4, 3
        ),
    }
    print(json.dumps(made))


if __name__ == "__main__":
    main()
