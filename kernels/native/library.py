"""The C++ library's functions as Python sees them; mirrors api.h and api.cpp."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.quantized import BlockKind


class Pool(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("num_blocks", c_int32),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_dim", c_int32),
        ("format", c_int32),
    )


class Rows(ctypes.Structure):
    """PagedRows."""

    _fields_ = (
        ("row_start", c_void_p),
        ("table_start", c_void_p),
        ("block_ids", c_void_p),
        ("kv_len", c_void_p),
        ("num_seqs", c_int32),
        ("is_causal", c_int32),
    )


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("num_out", c_int32),
        ("num_in", c_int32),
        ("format", c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Matrix),
        ("attention_out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("eps", c_float),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("hidden", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q", c_void_p),
        ("acc", c_void_p),
        ("max", c_void_p),
        ("sum", c_void_p),
        ("slots", c_void_p),
        ("rows", Rows),
        ("pool", Pool),
        ("num_rows", c_int32),
        ("attention_s", c_double),
    )


class Wire(ctypes.Structure):
    _fields_ = (
        ("socket", c_int32),
        ("head_bytes", c_int32),
        ("sent_heads", c_void_p),
        ("awaited_heads", c_void_p),
        ("head", c_void_p),
        ("timeout_s", c_double),
        ("status", c_int32),
        ("num_sent", c_int32),
        ("num_received", c_int32),
        ("waited_s", c_double),
    )


class WiredPart(ctypes.Structure):
    _fields_ = (
        ("wire", Wire),
        ("row_ids", c_void_p),
        ("num_rows", c_int32),
        ("query", c_void_p),
        ("partial", c_void_p),
    )


FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BLOCK_FORMATS: dict[BlockKind, int] = {"Q4_1": 3, "Q8_0": 4}


@dataclass(frozen=True, slots=True)
class Library:
    """ctypes releases the GIL during each call. The last five return what was wrong, or None."""

    start_threads: Callable[..., int]
    stop_threads: Callable[..., None]
    fastest_format: Callable[..., int]
    matrix_bytes: Callable[..., int]
    pack: Callable[..., None]
    begin_layer: Callable[..., None]
    attend: Callable[..., None]
    end_layer: Callable[..., None]
    run_layers: Callable[..., int]
    compute_logits: Callable[..., None]
    find_likeliest: Callable[..., None]
    finalize: Callable[..., None]
    check_step: Callable[..., bytes | None]
    answer_layers: Callable[..., bytes | None]
    micro_attention: Callable[..., bytes | None]
    write_kv: Callable[..., bytes | None]
    merge_rows: Callable[..., bytes | None]


_THREE = (c_void_p, c_void_p, c_void_p)
_POOL_AND_LAYER = (POINTER(Pool), c_int)
#: The threads, all layers, which of them or how many, and the step.
_STEP_AND_LAYER = (c_void_p, POINTER(Layer), c_int, POINTER(Step))
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "start_threads": (c_void_p, (c_int,)),
    "stop_threads": (None, (c_void_p,)),
    "fastest_format": (c_int32, (c_int32,)),
    "matrix_bytes": (c_int64, (POINTER(Matrix),)),
    "pack": (None, (c_void_p, POINTER(Matrix), c_void_p, c_void_p)),
    "begin_layer": (None, _STEP_AND_LAYER),
    "attend": (None, _STEP_AND_LAYER),
    "end_layer": (None, _STEP_AND_LAYER),
    "run_layers": (c_int, (*_STEP_AND_LAYER, POINTER(WiredPart), c_int)),
    "check_step": (c_char_p, (POINTER(Step), c_int64)),
    "compute_logits": (
        None,
        (c_void_p, c_void_p, c_float, POINTER(Matrix), c_void_p, c_int, c_void_p),
    ),
    "find_likeliest": (None, (c_void_p, c_void_p, c_int, c_int, c_void_p)),
    "finalize": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "answer_layers": (
        c_char_p,
        (
            *(c_void_p, *_POOL_AND_LAYER),
            *(POINTER(Rows), c_int64, c_int),  # how many block ids, num_heads
            *(POINTER(WiredPart), c_int, c_double),  # the first layer, patience
        ),
    ),
    "micro_attention": (
        c_char_p,
        (
            *(c_void_p, *_POOL_AND_LAYER),
            *(c_void_p, c_int64, c_int),  # q, num_rows, num_heads
            *(POINTER(Rows), c_int64),  # and how many block ids
            *_THREE,
        ),
    ),
    "write_kv": (c_char_p, (*_POOL_AND_LAYER, c_void_p, c_void_p, c_void_p, c_int64)),
    "merge_rows": (
        c_char_p,
        (*_THREE, c_int64, c_void_p, c_int64, *_THREE, c_int64, c_int64),
    ),
}


def load_library(path: Path) -> Library:
    """Raises OSError where the file cannot be loaded."""
    library = ctypes.CDLL(str(path))
    functions: dict[str, Any] = {}
    for name, (restype, argtypes) in _SIGNATURES.items():
        functions[name] = getattr(library, f"illm_{name}")
        functions[name].restype, functions[name].argtypes = restype, argtypes
    return Library(**functions)
