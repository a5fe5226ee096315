"""Tells the gManager what this instance holds and hears who else is there.

Heartbeats carry changes only, numbered; the answer may ask for a full report or a new registration.
While the gManager is away, serving goes on and the last view stays.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from protos.infinite_llm.v1 import gmanager_pb2, types_pb2
from services.common.ids import InstId, ReqId, Term
from services.common.rpc import PROBE_DEADLINE_S
from services.worker.rmanager.clients import Clients, peer_view
from services.worker.rmanager.fence import Fence
from services.worker.rmanager.peers import PeerView, Unlisted

logger = logging.getLogger(__name__)

#: (req_id, owner inst_id) -> blocks held here.
Holdings = dict[tuple[ReqId, InstId], int]

_FIRST_PERIOD_S = 0.2
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(slots=True)
class PlacementReport:
    """What was reported last, so that a heartbeat carries only what changed. Pure."""

    inst_id: int
    sequence_number: int = 0
    must_be_full: bool = True
    _reported: Holdings = field(default_factory=dict)

    def next(self, holdings: Holdings) -> tuple[int, bool, list[types_pb2.RequestPlacementEntry]]:
        """Sequence number, whether it is full, and the entries of the next heartbeat."""
        is_full = self.must_be_full
        if is_full:
            changed = dict(holdings)
        else:
            gone = dict.fromkeys(self._reported.keys() - holdings.keys(), 0)
            changed = gone | {k: n for k, n in holdings.items() if self._reported.get(k) != n}
        self.sequence_number += 1
        self.must_be_full = False
        self._reported = dict(holdings)
        return self.sequence_number, is_full, [self._entry(*row) for row in changed.items()]

    def _entry(self, key: tuple[ReqId, InstId], num_blocks: int) -> types_pb2.RequestPlacementEntry:
        req_id, owner = key
        return types_pb2.RequestPlacementEntry(
            req_id=req_id,
            inst_id=self.inst_id,
            num_blocks=num_blocks,
            local=owner == self.inst_id,
            owner_inst_id=owner,
        )


class Heartbeat:
    """Registers, then beats until cancelled."""

    def __init__(
        self,
        info: types_pb2.InstanceInfo,
        clients: Clients,
        observe: Callable[[], tuple[Holdings, types_pb2.InstanceLoad]],
        on_view: Callable[[list[PeerView], Unlisted], None],
        on_away: Callable[[], None],
        fence: Fence,
    ) -> None:
        """`on_away`: the gManager stopped answering, so that the last view grows old."""
        self._info = info
        self._clients = clients
        self._observe = observe
        self._on_view = on_view
        self._on_away = on_away
        self._fence = fence
        self._report = PlacementReport(info.inst_id)
        self._told_perf = types_pb2.PerfConstants()
        self._period_s = _FIRST_PERIOD_S
        self._is_registered = False
        self._is_due = asyncio.Event()
        self.first_view = asyncio.Event()
        """Set once the gManager has answered a heartbeat."""

    async def run(self) -> None:
        was_away = False
        while True:
            try:
                await self._beat()
                was_away = False
            except grpc.aio.AioRpcError as error:
                self._report.must_be_full = True
                if error.code() not in _AWAY:
                    logger.error("heartbeat refused: %s %s", error.code().name, error.details())
                elif not was_away:
                    self._on_away()
                    logger.warning("gManager away: %s %s", error.code().name, error.details())
                was_away = error.code() in _AWAY
            await self._until_due()

    def beat_now(self) -> None:
        """What changed cannot wait for the next period."""
        self._is_due.set()

    async def deregister(self) -> None:
        """Leave on purpose, so that nobody has to wait for a time-out."""
        request = gmanager_pb2.DeregisterRequest(
            inst_id=self._info.inst_id, incarnation=self._info.incarnation
        )
        try:
            await self._clients.gmanager.ask(
                lambda gmanager: gmanager.Deregister(request, timeout=PROBE_DEADLINE_S)
            )
        except grpc.aio.AioRpcError as error:
            logger.warning("could not deregister: %s", error.code().name)

    async def _until_due(self) -> None:
        with contextlib.suppress(TimeoutError):
            # Not wait_for: where event and cancellation meet, that forgets the cancellation.
            async with asyncio.timeout(self._period_s):
                await self._is_due.wait()
        self._is_due.clear()

    async def _beat(self) -> None:
        if not self._is_registered:
            # A copy: the constants may change meanwhile.
            registration = gmanager_pb2.RegisterRequest(info=self._info)
            answer = await self._clients.gmanager.ask(
                lambda gmanager: gmanager.Register(registration, timeout=PROBE_DEADLINE_S)
            )
            self._told_perf.CopyFrom(registration.info.perf)
            self._period_s = answer.heartbeat_period_s or self._period_s
            self._is_registered = True
            self._report.must_be_full = True
        holdings, load = self._observe()
        number, is_full, entries = self._report.next(holdings)
        request = gmanager_pb2.HeartbeatRequest(
            inst_id=self._info.inst_id,
            incarnation=self._info.incarnation,
            sequence_number=number,
            full=is_full,
            entries=entries,
            load=load,
            perf=self._news_of_perf(is_full),
        )
        response = await self._clients.gmanager.ask(
            lambda gmanager: gmanager.Heartbeat(request, timeout=PROBE_DEADLINE_S)
        )
        self._fence.admits(Term(response.term))
        if response.register_again:
            self._is_registered = False
            return
        if request.HasField("perf"):
            self._told_perf.CopyFrom(request.perf)
        self._report.must_be_full = response.full_report
        self._on_view(
            [peer_view(view) for view in response.peers],
            Unlisted(response.unlisted_peers, response.unlisted_blocks),
        )
        self.first_view.set()

    def _news_of_perf(self, is_full: bool) -> types_pb2.PerfConstants | None:
        """The constants of the performance model, unless the gManager has them already."""
        perf = self._info.perf
        return perf if is_full or perf != self._told_perf else None
