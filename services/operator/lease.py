"""Which of several operators works: the one that holds a Lease.

Times of others are never compared with ours: a Lease is over when it has not changed for its
length on our own clock. The holder stops to act well before that, by the same clock. (The official
client's election has no deadlines and ends with the first refused connection.)
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from services.operator import paths
from services.operator.api import Api, ApiError
from services.operator.resource import Object

_log = logging.getLogger(__name__)

#: Shares of the lease: how often it is renewed, and how long it is relied upon without that.
_RENEW_SHARE = 0.15
_RELY_SHARE = 0.6


class LeaseHolder:
    """Owner of our claim; `run` keeps it."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._lease_s = lease_s
        self._clock = clock
        self._relied_until_s = 0.0
        self._was_leader = False
        self._seen: Object = {}
        self._seen_at_s = 0.0
        self._changed = asyncio.Event()
        self.last_try_s = clock()
        """When the last attempt began, whatever came of it."""
        self.has_answer = False
        """Whether the server has answered once."""

    @property
    def is_leader(self) -> bool:
        return self._clock() < self._relied_until_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self._lease_s * _RENEW_SHARE)

    async def step(self) -> None:
        """Takes the Lease where nobody holds it, renews it where we do."""
        self.last_try_s = self._clock()
        try:
            if await self._claim():
                self._relied_until_s = self.last_try_s + self._lease_s * _RELY_SHARE
            else:
                self._relied_until_s = 0.0
            self.has_answer = True
        except ApiError as error:
            _log.warning("cannot renew the lease", extra={"reason": error.message})
        if self.is_leader != self._was_leader:
            _log.info("leading" if self.is_leader else "leading no more")
        self._was_leader = self.is_leader
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, is_leader: bool) -> None:
        """Until we lead, or do not any more."""
        while self.is_leader != is_leader:
            changed = self._changed
            left_s = max(0.05, self._relied_until_s - self._clock()) if self.is_leader else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()

    async def resign(self) -> None:
        """The next one need not wait."""
        if not self.is_leader:
            return
        self._relied_until_s = 0.0
        try:
            lease = await self._api.get(self._path)
            if lease.get("spec", {}).get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._api.replace(self._path, lease)
        except ApiError as error:
            _log.warning("cannot give the lease back", extra={"reason": error.message})

    @property
    def _path(self) -> str:
        return f"{paths.leases(self._namespace)}/{self._name}"

    async def _claim(self) -> bool:
        try:
            lease = await self._api.get(self._path)
        except ApiError as error:
            if not error.is_gone:
                raise
            return await self._create()
        spec = lease.get("spec") or {}
        if spec != self._seen:
            self._seen, self._seen_at_s = dict(spec), self._clock()
        holder = spec.get("holderIdentity")
        length_s = spec.get("leaseDurationSeconds", self._lease_s)
        is_over = not holder or self._clock() - self._seen_at_s >= length_s
        if holder != self._identity and not is_over:
            return False
        renewed = lease | {"spec": self._spec(spec)}
        return await self._write(self._api.replace, self._path, renewed)

    async def _create(self) -> bool:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._spec({}),
        }
        return await self._write(self._api.create, paths.leases(self._namespace), body)

    async def _write(
        self, call: Callable[[str, Object], Awaitable[Object]], path: str, body: Object
    ) -> bool:
        """False where somebody was faster."""
        try:
            await call(path, body)
        except ApiError as error:
            if error.is_conflict:
                return False
            raise
        return True

    def _spec(self, before: Object) -> Object:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = before | {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._lease_s),
            "renewTime": now,
        }
        if before.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = before.get("leaseTransitions", -1) + 1
        return spec
