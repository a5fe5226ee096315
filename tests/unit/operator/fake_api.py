"""An API server in memory: versions, conflicts, and faults where a test wants them."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeVar

from services.operator.api import Api, ApiError
from services.operator.pods import format_time
from services.operator.resource import Object
from tests.unit.operator.builders import NOW_S, pod_status

Answer = TypeVar("Answer")
Objects = list[Object]


class FakeApi(Api):
    """`fault(method, path)` is asked before and after each call; what it raises, the caller gets.

    Before: nothing was done. After: it was done, and the answer is lost.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.events: list[Object] = []
        self.calls: list[tuple[str, str]] = []
        self.fault_before: Callable[[str, str], None] = lambda method, path: None
        self.fault_after: Callable[[str, str], None] = lambda method, path: None
        self.now_s = NOW_S
        self._versions = itertools.count(1)
        self._changed = asyncio.Condition()
        self._num_changes = 0

    async def close(self) -> None:
        return

    # -- calls ------------------------------------------------------------------------------------

    async def get(self, path: str) -> Object:
        return self._answer("GET", path, lambda: _copy(self._found(path)))

    async def list(self, path: str, selector: Mapping[str, str] | None = None) -> list[Object]:
        return self._answer("LIST", path, lambda: self._listed(path, selector or {}))

    async def create(self, path: str, body: Object) -> Object:
        return self._answer("POST", path, lambda: self._create(path, body))

    async def replace(self, path: str, body: Object) -> Object:
        return self._answer("PUT", path, lambda: self._replace(path, body))

    async def patch(self, path: str, body: Object) -> Object:
        return self._answer("PATCH", path, lambda: self._patch(path, body))

    async def delete(self, path: str, uid: str) -> None:
        self._answer("DELETE", path, lambda: self._delete(path, uid))

    async def watch(
        self, path: str, selector: Mapping[str, str] | None = None
    ) -> AsyncIterator[Object]:
        self._answer("WATCH", path, lambda: None)
        seen: dict[str, Object] = {}
        while True:
            num_changes = self._num_changes
            found = {each["metadata"]["name"]: each for each in self._listed(path, selector or {})}
            changed = [each for name, each in found.items() if seen.get(name) != each]
            deleted = [each for name, each in seen.items() if name not in found]
            seen = found
            for each in changed + deleted:
                yield each
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_changes != num_changes)  # noqa: B023
            self._answer("WATCH", path, lambda: None)

    # -- what other parts of a cluster do ---------------------------------------------------------

    def put(self, path: str, body: Object) -> None:
        """A user's write."""
        before = self.objects.get(path, {}).get("metadata", {})
        body = _copy(body)
        if before and before.get("generation"):
            body["metadata"]["generation"] = before["generation"] + 1
        self._store(path, body)

    def edit(self, path: str, change: Callable[[Object], object]) -> None:
        body = _copy(self.objects[path])
        change(body)
        self._store(path, body)

    def run_pods(self) -> None:
        """The kubelet: what is new runs, what is to end has ended."""
        for path in [path for path in self.objects if "/pods/" in path]:
            pod = self.objects[path]
            if "deletionTimestamp" in pod["metadata"]:
                self.remove(path)
            elif "status" not in pod:
                inst_id = pod["metadata"]["labels"]["infinite-llm.io/instance-id"]
                status = pod_status() | {"podIP": f"10.0.0.{inst_id}"}
                self._store(path, pod | {"status": status})

    def remove(self, path: str) -> None:
        del self.objects[path]
        self._announce()

    # -- the server itself ------------------------------------------------------------------------

    def _answer(self, method: str, path: str, answer: Callable[[], Answer]) -> Answer:
        self.calls.append((method, path))
        self.fault_before(method, path)
        answered = answer()
        self.fault_after(method, path)
        return answered

    def _found(self, path: str) -> Object:
        if path not in self.objects:
            raise ApiError(404, f"{path} not found")
        return self.objects[path]

    def _listed(self, path: str, selector: Mapping[str, str]) -> Objects:
        return [
            _copy(each)
            for at, each in sorted(self.objects.items())
            if at.rpartition("/")[0] == path
            and selector.items() <= each["metadata"].get("labels", {}).items()
        ]

    def _create(self, path: str, body: Object) -> Object:
        if path.endswith("/events"):
            self.events.append(body)
            return body
        at = f"{path}/{body['metadata']['name']}"
        if at in self.objects:
            raise ApiError(409, f"{at} already exists")
        body = _copy(body)
        name, version = body["metadata"]["name"], next(self._versions)
        body["metadata"] |= {
            "uid": f"uid-{name}-{version}",
            "creationTimestamp": format_time(self.now_s),
        }
        return self._store(at, body)

    def _replace(self, path: str, body: Object) -> Object:
        version = self._found(path)["metadata"]["resourceVersion"]
        if body["metadata"].get("resourceVersion") != version:
            raise ApiError(409, "the object has been modified")
        return self._store(path, body)

    def _patch(self, path: str, body: Object) -> Object:
        at = path.removesuffix("/status")
        found = self._found(at)
        uid = body.get("metadata", {}).get("uid")
        if uid is not None and uid != found["metadata"]["uid"]:
            raise ApiError(409, "precondition failed: UID")
        return self._store(at, _merged(found, body))

    def _delete(self, path: str, uid: str) -> None:
        if self._found(path)["metadata"]["uid"] != uid:
            raise ApiError(409, "precondition failed: UID")
        if "status" in self.objects[path]:
            self.edit(path, lambda pod: pod["metadata"].update(deletionTimestamp="now"))
        else:
            self.remove(path)  # no node has it yet

    def _store(self, path: str, body: Object) -> Object:
        body = _copy(body)
        body["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[path] = body
        self._announce()
        return _copy(body)

    def _announce(self) -> None:
        self._num_changes += 1

        async def announce() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._announcing = asyncio.ensure_future(announce())


def _copy(body: Object) -> Object:
    copied: Object = json.loads(json.dumps(body))
    return copied


def _merged(base: Object, patch: Object) -> Object:
    """JSON merge patch."""
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _merged(merged.get(key) or {}, value)
        else:
            merged[key] = value
    return merged
