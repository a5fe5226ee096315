"""The Kubernetes API server: objects as JSON has them, each call with a deadline.

A thin layer over the official client, which knows how to find the server, its certificates and our
token, and when to read it anew.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from services.common.errors import ServerError
from services.operator.resource import Object, format_selector

#: One call, all of it.
CALL_DEADLINE_S = 5.0
#: The server ends a watch after this long; it is begun anew.
_WATCH_S = 240
_WATCH_SILENCE_S = _WATCH_S + 15

_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"


class ApiError(ServerError):
    """What the server answered; status 0: nothing, it cannot be reached."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_gone(self) -> bool:
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        return self.status == 409


class Api:
    """Owns the connections; `close` ends them."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, path: str) -> Object:
        return await self._call("GET", path)

    async def list(self, path: str, selector: Mapping[str, str] | None = None) -> list[Object]:
        query = {"labelSelector": format_selector(selector)} if selector else {}
        items: list[Object] = (await self._call("GET", path, query=query))["items"]
        return items

    async def create(self, path: str, body: Object) -> Object:
        return await self._call("POST", path, body)

    async def replace(self, path: str, body: Object) -> Object:
        """Refused with a conflict where somebody was faster."""
        return await self._call("PUT", path, body)

    async def patch(self, path: str, body: Object) -> Object:
        """Only what `body` names; null removes."""
        return await self._call("PATCH", path, body, content_type=_MERGE_PATCH)

    async def apply(self, path: str, body: Object, manager: str) -> Object:
        """On the server, and whoever else set these fields before."""
        query = {"fieldManager": manager, "force": "true"}
        return await self._call("PATCH", path, body, query, _APPLY_PATCH)

    async def delete(self, path: str, uid: str) -> None:
        """That very object, not one of the same name that came after it."""
        await self._call("DELETE", path, {"preconditions": {"uid": uid}})

    async def watch(
        self, path: str, selector: Mapping[str, str] | None = None
    ) -> AsyncIterator[Object]:
        """Every object that there is, then each that changes; ends every few minutes."""
        query = {"watch": "true", "timeoutSeconds": str(_WATCH_S)}
        if selector:
            query["labelSelector"] = format_selector(selector)
        timeout = aiohttp.ClientTimeout(sock_connect=CALL_DEADLINE_S, sock_read=_WATCH_SILENCE_S)
        try:
            response = await self._send("GET", path, None, query, "", timeout)
            async for line in response.content:
                yield _watched(line)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiError(0, f"the watch broke off: {error!r}") from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "",
    ) -> Object:
        timeout = aiohttp.ClientTimeout(total=CALL_DEADLINE_S)
        try:
            response = await self._send(method, path, body, query or {}, content_type, timeout)
            answer: Object = json.loads(await response.read())
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiError(0, f"the API server does not answer: {error!r}") from error
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: Mapping[str, str],
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        if content_type:
            headers["Content-Type"] = content_type
        request = await self._client.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, body=body,
            auth_settings=["BearerToken"],
        )  # fmt: skip
        answer = await self._client.call_api(*request, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        if response.status >= 400:
            raise ApiError(response.status, _message(await response.text()))
        return response


def kubeconfig_of(environ: Mapping[str, str]) -> str | None:
    """The user's file; None in a pod, which has its account's token at hand."""
    if "KUBECONFIG" in environ:
        return environ["KUBECONFIG"]
    return None if "KUBERNETES_SERVICE_HOST" in environ else "~/.kube/config"


async def connect(kubeconfig: str | None) -> Api:
    """Inside a cluster with the pod's own account; elsewhere as the file says."""
    configuration = Configuration()
    if kubeconfig is None:
        load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    else:
        await load_kube_config(  # type: ignore[no-untyped-call]
            kubeconfig, client_configuration=configuration
        )
    return Api(ApiClient(configuration))


def _watched(line: bytes) -> Object:
    event: dict[str, Any] = json.loads(line)
    changed: Object = event["object"]
    if event["type"] == "ERROR":
        raise ApiError(changed.get("code", 0), changed.get("message", ""))
    return changed


def _message(text: str) -> str:
    """The server explains itself in a Status object; what stands before it may not."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
