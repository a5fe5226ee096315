"""Protos and domain values say the same; what the gManager could not use is refused."""

import math
from dataclasses import replace

import pytest

from protos.infinite_llm.v1 import types_pb2
from services.common.errors import InvalidRequest
from services.common.ids import InstId
from services.gmanager import convert
from services.gmanager.cluster import InstanceLoad, LinkTerms
from tests.unit.gmanager.builders import PERF, make_info, make_instance, make_row

FULL_PERF = replace(
    PERF, link_round_trip_s=4e-5, link_bytes_per_s=1e9, num_layers=30, row_bytes=5000,
    links={InstId(4): LinkTerms(6e-5, 8e8)},
)  # fmt: skip
FULL_LOAD = InstanceLoad(1, 2, 3, 4, 5, 6, 7.5, 8, True, (4, 2))


def test_an_instance_survives_the_wire() -> None:
    instance = make_instance(3, FULL_LOAD, perf=FULL_PERF)
    proto = convert.view_to_proto(instance, now_s=2.0)
    assert proto.age_s == 2.0
    assert convert.view_from_proto(proto, now_s=2.0) == instance


def test_every_field_of_the_protos_is_carried() -> None:
    info = convert.info_to_proto(make_info(3, perf=FULL_PERF))
    for message in (info, info.perf, convert.load_to_proto(FULL_LOAD)):
        set_fields = {descriptor.name for descriptor, _ in message.ListFields()}
        assert set_fields == {descriptor.name for descriptor in message.DESCRIPTOR.fields}


def test_a_row_survives_the_wire() -> None:
    row = make_row(7, 2, 3, owner=1)
    assert convert.entry_from_proto(convert.entry_to_proto(row)) == row


def test_all_rows_of_an_instance_survive_together() -> None:
    rows = [make_row(7, 2, 3), make_row(8, 2, 1, owner=1)]
    assert convert.rows_from_proto(convert.rows_to_proto(InstId(2), rows)) == rows


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError):
        convert.rows_from_proto(types_pb2.InstanceRows(inst_id=2, req_ids=[7]))


@pytest.mark.parametrize("name", ["incarnation", "control_address", "block_size", "num_blocks"])
def test_a_missing_field_is_named(name: str) -> None:
    info = convert.info_to_proto(make_info(1))
    info.ClearField(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=name) as caught:
        convert.info_from_proto(info)
    assert caught.value.param == f"info.{name}"


@pytest.mark.parametrize(
    "perf",
    [
        pytest.param(types_pb2.PerfConstants(attention_s_per_token=-1.0), id="negative"),
        pytest.param(types_pb2.PerfConstants(link_bytes_per_s=math.inf), id="infinite"),
        pytest.param(types_pb2.PerfConstants(link_round_trip_s=math.nan), id="nan"),
        pytest.param(
            types_pb2.PerfConstants(links=[types_pb2.LinkTerms(inst_id=2, bytes_per_s=-1.0)]),
            id="negative-link",
        ),
        pytest.param(
            types_pb2.PerfConstants(non_attention=[types_pb2.BatchPoint(batch=0, step_s=1.0)]),
            id="batch-zero",
        ),
        pytest.param(
            types_pb2.PerfConstants(non_attention=[types_pb2.BatchPoint(batch=2, step_s=1.0)] * 2),
            id="batch-twice",
        ),
        pytest.param(
            types_pb2.PerfConstants(non_attention=[types_pb2.BatchPoint(batch=1, step_s=0.0)]),
            id="no-time",
        ),
    ],
)
def test_perf_constants_without_a_meaning_are_refused(perf: types_pb2.PerfConstants) -> None:
    info = convert.info_to_proto(make_info(1))
    info.perf.CopyFrom(perf)
    with pytest.raises(InvalidRequest, match="must"):
        convert.info_from_proto(info)


def test_an_instance_without_a_cap_may_lend_all_its_blocks() -> None:
    info = convert.info_to_proto(make_info(1, num_blocks=40, max_lent_blocks=0))
    assert convert.info_from_proto(info).max_lent_blocks == 0
    info.ClearField("max_lent_blocks")
    assert convert.info_from_proto(info).max_lent_blocks == 40


def test_an_instance_that_was_not_measured_may_register() -> None:
    info = convert.info_to_proto(make_info(1))
    info.ClearField("perf")
    assert convert.info_from_proto(info).perf.non_attention == ()
