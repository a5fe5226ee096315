"""Memory is read at some rate."""

import pytest
import torch

from benchmarks.bandwidth import read_bytes_per_s


@pytest.fixture
def keep_threads() -> object:
    before = torch.get_num_threads()
    yield None
    torch.set_num_threads(before)


@pytest.mark.usefixtures("keep_threads")
def test_a_buffer_is_read_at_some_rate() -> None:
    assert read_bytes_per_s(num_threads=1, buffer_bytes=1 << 20) > 1e6
