import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.distattention.wire import (
    HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    ErrorCode,
    Geometry,
    Head,
    Hello,
    Kind,
    KvDtype,
    RemotePart,
    WireError,
    pack_parts,
    unpack_parts,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
parts = st.builds(
    RemotePart,
    u64.map(ReqId),
    st.lists(u64.map(MoveId), min_size=1, max_size=5).map(tuple),
    st.integers(1, 2**32 - 1),
)
geometries = st.builds(Geometry, u32, u32, u32, u32, u32, st.sampled_from(KvDtype))


@settings(deadline=None)
@given(st.sampled_from(Kind), u32, u32, u64, st.floats(0, 1))
def test_heads_survive_the_wire(
    kind: Kind, item: int, detail: int, ident: int, fullness: float
) -> None:
    head = Head(kind, item, detail, ident, int(fullness * MAX_PAYLOAD_BYTES[kind]))
    assert Head.unpack(head.pack()) == head


@settings(deadline=None)
@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_garbage_is_no_head(data: bytes) -> None:
    with pytest.raises(WireError):
        Head.unpack(data)


@pytest.mark.parametrize("kind", Kind)
def test_a_head_never_announces_more_than_its_kind_may_carry(kind: Kind) -> None:
    with pytest.raises(WireError, match="at most"):
        Head.unpack(Head(kind, 0, 0, 0, MAX_PAYLOAD_BYTES[kind] + 1).pack())


def test_other_versions_and_kinds_are_refused() -> None:
    packed = bytearray(Head(Kind.ACK).pack())
    packed[4] += 1
    with pytest.raises(WireError, match="version 2") as caught:
        Head.unpack(packed)
    assert caught.value.error is ErrorCode.MISMATCH
    packed = bytearray(Head(Kind.ACK).pack())
    packed[6] = 99
    with pytest.raises(WireError, match="unknown kind 99"):
        Head.unpack(packed)


@settings(deadline=None)
@given(u32.map(InstId), u64.map(Incarnation), geometries, u32)
def test_hello_survives_the_wire(
    inst_id: InstId, incarnation: Incarnation, geometry: Geometry, max_rows: int
) -> None:
    hello = Hello(inst_id, incarnation, InstId(5), Incarnation(6), geometry, max_rows)
    packed = hello.pack()
    assert Hello.unpack(packed) == hello
    with pytest.raises(WireError):
        Hello.unpack(packed[:-1])


def test_hello_with_an_unknown_dtype_is_refused() -> None:
    geometry = Geometry(1, 1, 1, 64, 16, KvDtype.FLOAT32)
    packed = bytearray(
        Hello(InstId(1), Incarnation(1), InstId(2), Incarnation(2), geometry, 8).pack()
    )
    packed[-8] = 9
    with pytest.raises(WireError, match="dtype 9"):
        Hello.unpack(packed)


@settings(deadline=None)
@given(st.lists(parts, max_size=6))
def test_parts_survive_the_wire(wanted: list[RemotePart]) -> None:
    assert unpack_parts(pack_parts(wanted)) == wanted


@settings(deadline=None)
@given(st.lists(parts, min_size=1, max_size=3), st.integers(1, 15))
def test_parts_that_are_cut_short_are_refused(wanted: list[RemotePart], missing: int) -> None:
    with pytest.raises(WireError):
        unpack_parts(pack_parts(wanted)[:-missing])


@pytest.mark.parametrize(
    "part", [RemotePart(ReqId(1), (), 1), RemotePart(ReqId(1), (MoveId(2),), 0)]
)
def test_parts_of_nothing_are_refused(part: RemotePart) -> None:
    with pytest.raises(WireError, match="bad part"):
        unpack_parts(pack_parts([part]))


@pytest.mark.parametrize(("dtype", "size"), [(KvDtype.FLOAT32, 4), (KvDtype.BFLOAT16, 2)])
def test_a_block_holds_keys_and_values_of_all_layers(dtype: KvDtype, size: int) -> None:
    geometry = Geometry(30, 9, 3, 64, 16, dtype)
    assert geometry.block_bytes == 30 * 2 * 3 * 16 * 64 * size
