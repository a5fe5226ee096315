"""What carries blocks between this instance and its creditors: shared by mover and retriever."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from services.common.ids import ReqId
from services.worker.distattention.debtor import Peer
from services.worker.distattention.transfer import BlockFetcher, BlockSender
from services.worker.engine.attention import ChannelPool
from services.worker.engine.engine import Engine
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.kvcache.storage import KvStorage
from services.worker.rmanager.peers import Peers
from services.worker.rmanager.reserver import Reserver


@dataclass(frozen=True, slots=True)
class TransferParts:
    """All owned elsewhere."""

    storage: KvStorage
    engine: Engine
    channels: ChannelPool
    peers: Peers
    reserver: Reserver
    open_sender: Callable[[Peer], BlockSender]
    open_fetcher: Callable[[Peer], BlockFetcher]
    release: Callable[[RemoteSpan], None]
    trace_of: Callable[[ReqId], AbstractContextManager[None]]
    """The trace that a request's control calls belong to, while it lasts."""
