"""Every way to multiply says the same, as exactly as its weights allow."""

import logging
from types import SimpleNamespace

import pytest
import torch

from services.worker.models.linear import Linear, OneDnnLinear, PlainLinear, select_linear

CPU = torch.device("cpu")


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(40, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_rows", [1, 3, 8, 65])
@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        pytest.param(PlainLinear, 1e-5, id="plain"),
        pytest.param(OneDnnLinear, 1e-5, id="onednn"),
        pytest.param(select_linear("float32", CPU), 1e-5, id="float32"),
        pytest.param(select_linear("float16", CPU), 1e-2, id="float16"),
        pytest.param(lambda weight: PlainLinear(weight.half()), 5e-2, id="plain-float16"),
    ],
)
def test_products_agree(
    weight: torch.Tensor, make: type[PlainLinear], tolerance: float, num_rows: int
) -> None:
    x = torch.randn(num_rows, 24, generator=torch.Generator().manual_seed(num_rows))
    linear: Linear = make(weight)
    product = linear(x)
    assert product.dtype == torch.float32
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(product, exact, atol=tolerance, rtol=0)


def test_a_cpu_without_float16_products_keeps_float32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["none"]))
    with caplog.at_level(logging.WARNING):
        make = select_linear("float16", CPU)
    assert make is select_linear("float32", CPU)
    assert "stay float32" in caplog.text
