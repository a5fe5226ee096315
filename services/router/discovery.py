"""Which instances exist, asked from the gManager. Owner of the router's view of the cluster."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import grpc

from protos.infinite_llm.v1 import gmanager_pb2, types_pb2
from services.common.gmanagers import GManagers
from services.common.ids import Incarnation, InstId
from services.common.rpc import error_from_rpc
from services.router.capacity import UsualCapacity, max_request_tokens
from services.router.routing import Instance, serving

PERIOD_S = 0.25
DEADLINE_S = 1.0

_log = logging.getLogger(__name__)


class Discovery:
    """Keeps the last view while the gManager is away, so that serving goes on."""

    def __init__(
        self,
        gmanager: GManagers,
        model: str,
        pooling: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gmanager = gmanager
        self._model = model
        self.is_pooling = pooling
        self._clock = clock
        self._away = False
        self._refreshed = asyncio.Event()
        self._usual_capacity = UsualCapacity()
        self.instances: tuple[Instance, ...] = ()
        """All instances of the last view, serving or not."""

    @property
    def serving(self) -> list[Instance]:
        """The instances that may be given a request."""
        return serving(self.instances, self._model)

    @property
    def usual_capacity(self) -> int:
        """Tokens that one request could use when all instances of late were there."""
        return self._usual_capacity.num_tokens

    async def run(self, after_refresh: Callable[[], Awaitable[None]]) -> None:
        """Polls until cancelled."""
        while True:
            await self.refresh()
            await after_refresh()
            await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        try:
            view = await self._gmanager.ask(
                lambda gmanager: gmanager.GetClusterView(
                    gmanager_pb2.GetClusterViewRequest(instances_only=True), timeout=DEADLINE_S
                )
            )
        except grpc.aio.AioRpcError as error:
            if not self._away:
                reason = error_from_rpc(error).message
                _log.warning("gManager is away, keeping the last view", extra={"reason": reason})
            self._away = True
            return
        if self._away:
            _log.info("gManager is back")
        self._away = False
        now_s = self._clock()
        self.instances = tuple(_instance(entry, now_s, self.is_pooling) for entry in view.instances)
        self._usual_capacity.note(max_request_tokens(self.serving), now_s)
        self._refreshed.set()
        self._refreshed = asyncio.Event()

    async def next_view(self) -> None:
        """Waits until there is one; for ever while the gManager is away."""
        await self._refreshed.wait()


def _instance(view: types_pb2.InstanceView, now_s: float, pooling: bool) -> Instance:
    info, load = view.info, view.load
    max_model_len = info.max_model_len
    if not pooling:
        max_model_len = min(max_model_len, info.num_blocks * info.block_size)
    return Instance(
        inst_id=InstId(info.inst_id),
        incarnation=Incarnation(info.incarnation),
        address=info.control_address,
        model=info.model,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_model_len=max_model_len,
        free_blocks=load.free_blocks,
        waiting_blocks=load.waiting_blocks,
        batch=load.running + load.waiting,
        draining=load.draining,
        age_s=view.age_s,
        reported_at_s=now_s - view.age_s,
        num_waiting=load.waiting,
    )
