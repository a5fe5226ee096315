"""What the attention benchmark counts."""

import pytest
import torch

from benchmarks.attention import attention_s, kv_bytes
from kernels.reference import ReferenceKernels


def test_both_planes_of_every_token_are_read() -> None:
    assert kv_bytes(2, 100, torch.float16) == 2 * 100 * 2 * 3 * 64 * 2


def test_a_pass_is_timed_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.attention._CACHE_BYTES", 0)
    ticks = iter([0.0, 6.0, 10.0, 14.0])
    monkeypatch.setattr("benchmarks.attention.time.perf_counter", lambda: next(ticks))
    assert attention_s(ReferenceKernels(), 1, 16, torch.float32, passes=2) == 2.0
