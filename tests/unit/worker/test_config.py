import dataclasses
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.worker.config import Config

PLAIN = Config(0, "model")
TLS: dict[str, Any] = {
    "data_tls_certificate": "c.pem",
    "data_tls_key": "k.pem",
    "data_tls_ca": "ca.pem",
}


@pytest.mark.parametrize("missing", TLS)
def test_tls_files_are_set_together(missing: str) -> None:
    dataclasses.replace(PLAIN, **TLS)
    with pytest.raises(ConfigError, match=f"INFINITE_LLM_{missing.upper()} must be set together"):
        dataclasses.replace(PLAIN, **{**TLS, missing: ""})


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:7101", "tls:[::]:7101"])
def test_nobody_is_told_to_connect_to_a_wildcard(address: str) -> None:
    with pytest.raises(ConfigError, match="INFINITE_LLM_ADVERTISE_DATA_ADDRESS"):
        dataclasses.replace(PLAIN, data_address=address)


def test_cores_are_numbers() -> None:
    assert dataclasses.replace(PLAIN, cores="0,12").core_numbers == {0, 12}
    assert PLAIN.core_numbers == frozenset()
    for text in ("0-3", "0,", "one"):
        with pytest.raises(ConfigError, match="INFINITE_LLM_CORES must be numbers"):
            dataclasses.replace(PLAIN, cores=text)
