"""What the gManager knows of the cluster, as plain frozen values.

The pure modules (`placement_map`, `perf_model`, `policy`) speak these; `convert` translates them
from and to the protos, which say what each field means.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.ids import Incarnation, InstId, ReqId


class BatchPoint(NamedTuple):
    batch: float
    step_s: float


class LinkTerms(NamedTuple):
    round_trip_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PerfConstants:
    non_attention: tuple[BatchPoint, ...] = ()
    attention_s_per_token: float = 0.0
    link_round_trip_s: float = 0.0
    link_bytes_per_s: float = 0.0
    num_layers: int = 0
    row_bytes: int = 0
    #: The way to other instances, where it was measured.
    links: Mapping[InstId, LinkTerms] = field(default_factory=dict)


class BlockFormat(NamedTuple):
    """Where it is the same, a block means the same: one model, one block layout."""

    model: str
    block_size: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    inst_id: InstId
    incarnation: Incarnation
    control_address: str
    data_address: str
    model: str
    block_size: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    perf: PerfConstants
    node: str
    max_lent_blocks: int

    @property
    def block_format(self) -> BlockFormat:
        return BlockFormat(self.model, self.block_size, self.block_bytes)


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    free_blocks: int = 0
    lent_blocks: int = 0
    borrowed_blocks: int = 0
    running: int = 0
    waiting: int = 0
    waiting_blocks: int = 0
    tokens_per_s: float = 0.0
    running_tokens: int = 0
    draining: bool = False
    waiting_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Instance:
    info: InstanceInfo
    load: InstanceLoad
    last_heartbeat_s: float
    #: None until the first heartbeat since registration.
    last_sequence: int | None = None
    #: Its rows may be incomplete until it reports them all.
    needs_full_report: bool = True

    @property
    def inst_id(self) -> InstId:
        return self.info.inst_id


class RowKey(NamedTuple):
    req_id: ReqId
    inst_id: InstId


@dataclass(frozen=True, slots=True)
class PlacementEntry:
    """One row of the Request Placement Map."""

    req_id: ReqId
    inst_id: InstId
    num_blocks: int
    local: bool
    owner_inst_id: InstId

    @property
    def key(self) -> RowKey:
        return RowKey(self.req_id, self.inst_id)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    inst_id: InstId
    incarnation: Incarnation
    sequence_number: int
    full: bool
    entries: tuple[PlacementEntry, ...]
    load: InstanceLoad | None
    #: None where they are as they were.
    perf: PerfConstants | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """The whole map at one moment, in a stable order."""

    instances: tuple[Instance, ...] = ()
    entries: tuple[PlacementEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementView:
    """The map as a plan reads it."""

    instances: tuple[Instance, ...]
    #: The rows of each holder.
    rows: Mapping[InstId, Mapping[ReqId, PlacementEntry]]
    #: Those of them that lend.
    lent: Collection[PlacementEntry]
