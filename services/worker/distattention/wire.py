"""What the data plane says, as bytes. Pure; used by both ends of a connection.

Every message is one fixed head and a payload whose size the head gives and the kind bounds:

    kind      item          detail    ident      payload
    HELLO     -             -         -          Hello: who, to whom, geometry
    WELCOME   -             -         -          -
    PLAN      number of parts, rows   step       RemotePart, one after another
    QUERY     layer         rows      step       q float32 [rows, num_heads, head_dim]
    PARTIAL   layer         rows      step       acc, max, sum float32, one after another
    COPY      block index   crc32     move_id    the block
    ACK       block index   -         move_id    -
    FETCH     block index   -         move_id    -
    BLOCK     block index   crc32     move_id    the block
    PING      -             -         -          anything small, to be dropped
    PONG      -             -         -          -
    ERROR     ErrorCode     -         -          text, UTF-8; the sender then closes
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from services.common.errors import InfiniteLLMError
from services.common.ids import Incarnation, InstId, MoveId, ReqId

VERSION = 1
FLOAT32_BYTES = 4
MAX_ERROR_TEXT_BYTES = 4096

MAGIC = b"dAtt"
_HEAD = struct.Struct("<4sHHIIQQ")
_HELLO = struct.Struct("<IQIQIIIIIII")
_PART = struct.Struct("<QII")
_MOVE_ID = struct.Struct("<Q")

HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    PLAN = 3
    QUERY = 4
    PARTIAL = 5
    COPY = 6
    ACK = 7
    ERROR = 8
    FETCH = 9
    BLOCK = 10
    PING = 11
    PONG = 12


class ErrorCode(IntEnum):
    INTERNAL = 1
    BAD_MESSAGE = 2
    #: The peer is not who, or not built as, the other end believes.
    MISMATCH = 3
    PART_LOST = 4
    BAD_CHECKSUM = 5


class WireError(InfiniteLLMError):
    """A message that must not be, or that the other end refused. Ends its connection."""

    code = "data_plane"

    def __init__(self, error: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = error


# Garbage must never allocate much: what is not received into memory that is there already is small.
_MAX_BULK_BYTES = 1 << 32
MAX_PAYLOAD_BYTES = {
    Kind.HELLO: _HELLO.size,
    Kind.WELCOME: 0,
    Kind.PLAN: 1 << 20,
    Kind.QUERY: _MAX_BULK_BYTES,
    Kind.PARTIAL: _MAX_BULK_BYTES,
    Kind.COPY: _MAX_BULK_BYTES,
    Kind.ACK: 0,
    Kind.ERROR: MAX_ERROR_TEXT_BYTES,
    Kind.FETCH: 0,
    Kind.BLOCK: _MAX_BULK_BYTES,
    Kind.PING: 1 << 20,
    Kind.PONG: 0,
}


class Head(NamedTuple):
    """The fixed start of every message; the module's table says what the fields mean."""

    kind: Kind
    item: int = 0
    detail: int = 0
    ident: int = 0
    payload_bytes: int = 0

    def pack(self) -> bytes:
        return _HEAD.pack(MAGIC, VERSION, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Self:
        magic, version, number, item, detail, ident, payload_bytes = _HEAD.unpack(data)
        if magic != MAGIC:
            raise WireError(ErrorCode.BAD_MESSAGE, "not a message of the data plane")
        if version != VERSION:
            raise WireError(ErrorCode.MISMATCH, f"speaks version {version}, not {VERSION}")
        try:
            kind = Kind(number)
        except ValueError:
            raise WireError(ErrorCode.BAD_MESSAGE, f"unknown kind {number}") from None
        if payload_bytes > MAX_PAYLOAD_BYTES[kind]:
            text = f"{kind.name} with {payload_bytes} bytes, at most {MAX_PAYLOAD_BYTES[kind]}"
            raise WireError(ErrorCode.BAD_MESSAGE, text)
        return cls(kind, item, detail, ident, payload_bytes)


_HEAD_FIELDS = np.dtype(
    {
        "names": ["magic", "version", *Head._fields],
        "formats": ["S4", "<u2", "<u2", "<u4", "<u4", "<u8", "<u8"],
    }
)


class HeadsOfLayers:
    """The heads of a kind for all layers of a step, side by side, laid out once."""

    def __init__(self, kind: Kind, num_layers: int) -> None:
        self._fields = np.zeros(num_layers, _HEAD_FIELDS)
        self._fields["magic"], self._fields["version"] = MAGIC, VERSION
        self._fields["kind"], self._fields["item"] = kind, np.arange(num_layers)
        self._bytes = self._fields.view(np.uint8).reshape(num_layers, HEAD_BYTES)

    def of_step(self, step: int, num_rows: int, payload_bytes: int) -> NDArray[np.uint8]:
        """[num_layers, HEAD_BYTES]; the same memory each time."""
        self._fields["detail"], self._fields["ident"] = num_rows, step
        self._fields["payload_bytes"] = payload_bytes
        return self._bytes


class KvDtype(IntEnum):
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3

    @property
    def itemsize(self) -> int:
        return 4 if self is KvDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of one block and one query. Both ends must agree, or numbers would be wrong."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: KvDtype

    @property
    def block_bytes(self) -> int:
        num_values = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return num_values * self.kv_dtype.itemsize

    def query_bytes(self, num_rows: int) -> int:
        return num_rows * self.num_heads * self.head_dim * FLOAT32_BYTES

    def partial_bytes(self, num_rows: int) -> int:
        return num_rows * self.num_heads * (self.head_dim + 2) * FLOAT32_BYTES


@dataclass(frozen=True, slots=True)
class Peer:
    """One process start of one instance, and where its data plane listens."""

    inst_id: InstId
    incarnation: Incarnation
    data_address: str


@dataclass(frozen=True, slots=True)
class Hello:
    """Sent first by the owner. `max_rows`: what it may ask for at once; 0 for block copies only."""

    owner_inst_id: InstId
    owner_incarnation: Incarnation
    creditor_inst_id: InstId
    creditor_incarnation: Incarnation
    geometry: Geometry
    max_rows: int

    def pack(self) -> bytes:
        shape = self.geometry
        return _HELLO.pack(
            self.owner_inst_id,
            self.owner_incarnation,
            self.creditor_inst_id,
            self.creditor_incarnation,
            shape.num_layers,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.kv_dtype,
            self.max_rows,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Self:
        if len(data) != _HELLO.size:
            raise WireError(ErrorCode.BAD_MESSAGE, f"HELLO of {len(data)} bytes")
        (
            owner,
            owner_incarnation,
            creditor,
            creditor_incarnation,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            dtype,
            max_rows,
        ) = _HELLO.unpack(data)
        try:
            kv_dtype = KvDtype(dtype)
        except ValueError:
            raise WireError(ErrorCode.MISMATCH, f"unknown KV dtype {dtype}") from None
        return cls(
            InstId(owner),
            Incarnation(owner_incarnation),
            InstId(creditor),
            Incarnation(creditor_incarnation),
            Geometry(num_layers, num_heads, num_kv_heads, head_dim, block_size, kv_dtype),
            max_rows,
        )


@dataclass(frozen=True, slots=True)
class RemotePart:
    """What one request borrows from one creditor, and how many query rows it has in this step."""

    req_id: ReqId
    move_ids: tuple[MoveId, ...]
    num_rows: int


def pack_parts(parts: Sequence[RemotePart]) -> bytes:
    pieces: list[bytes] = []
    for part in parts:
        pieces.append(_PART.pack(part.req_id, part.num_rows, len(part.move_ids)))
        pieces.extend(_MOVE_ID.pack(move_id) for move_id in part.move_ids)
    return b"".join(pieces)


def unpack_parts(data: bytes | bytearray) -> list[RemotePart]:
    parts: list[RemotePart] = []
    at = 0
    while at < len(data):
        if at + _PART.size > len(data):
            raise WireError(ErrorCode.BAD_MESSAGE, "PLAN ends within a part")
        req_id, num_rows, num_moves = _PART.unpack_from(data, at)
        at += _PART.size
        end = at + num_moves * _MOVE_ID.size
        if num_rows < 1 or num_moves < 1 or end > len(data):
            raise WireError(ErrorCode.BAD_MESSAGE, f"PLAN with a bad part of request {req_id}")
        move_ids = tuple(MoveId(i) for (i,) in _MOVE_ID.iter_unpack(memoryview(data)[at:end]))
        parts.append(RemotePart(ReqId(req_id), move_ids, num_rows))
        at = end
    return parts
