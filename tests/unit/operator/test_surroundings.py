"""Settings, and what the kubelet asks."""

import aiohttp
import pytest

from services.common.addresses import free_ports
from services.common.config import from_env
from services.common.errors import ConfigError
from services.operator.apply_definitions import apply_definitions
from services.operator.config import OperatorConfig
from services.operator.health import health_server
from tests.unit.operator.fake_api import FakeApi
from tests.unit.operator.test_definition import DEFINITION


@pytest.mark.parametrize(
    ("text", "namespaces"), [("", ()), ("a", ("a",)), ("a, b,", ("a", "b")), (" ", ())]
)
def test_the_namespaces_that_are_watched(text: str, namespaces: tuple[str, ...]) -> None:
    config = from_env(OperatorConfig, {"INFINITE_LLM_WATCH_NAMESPACES": text})
    assert config.namespaces == namespaces


@pytest.mark.parametrize(
    ("name", "value"),
    [("NAMESPACE", ""), ("LEASE_NAME", ""), ("RESYNC_S", "0"), ("LEASE_S", "2"),
     ("HEALTH_PORT", "70000")],
)  # fmt: skip
def test_a_bad_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"INFINITE_LLM_{name}"):
        from_env(OperatorConfig, {f"INFINITE_LLM_{name}": value})


async def test_health_follows_what_it_is_told() -> None:
    (port,) = free_ports(1)
    state = {"alive": True, "ready": False}
    server = health_server("127.0.0.1", port, lambda: state["alive"], lambda: state["ready"])
    async with server, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def ask(path: str) -> int:
            async with session.get(path) as response:
                return response.status

        assert (await ask("/healthz"), await ask("/readyz")) == (200, 503)
        state.update(alive=False, ready=True)
        assert (await ask("/healthz"), await ask("/readyz")) == (503, 200)
        with pytest.raises(ConfigError, match="HEALTH_PORT"):
            async with health_server("127.0.0.1", port, lambda: True, lambda: True):
                pass


async def test_port_zero_serves_nothing() -> None:
    async with health_server("127.0.0.1", 0, lambda: True, lambda: True):
        pass


async def test_definitions_are_applied_from_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    api, applied = FakeApi(), []

    async def apply(path: str, body: object, manager: str) -> dict[str, object]:
        applied.append(path)
        return {}

    monkeypatch.setattr(api, "apply", apply)
    assert await apply_definitions(api, DEFINITION.parent) == ["infinitellms.infinite-llm.io"]
    assert applied == [
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/infinitellms.infinite-llm.io"
    ]
    with pytest.raises(ConfigError, match="no definitions"):
        await apply_definitions(api, DEFINITION.parent / "nowhere")
