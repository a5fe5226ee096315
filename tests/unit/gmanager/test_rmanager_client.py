"""MoveKvCache as a source rManager receives it, over real gRPC on loopback."""

import asyncio
from dataclasses import replace

import pytest

from protos.infinite_llm.v1 import worker_pb2
from services.common.addresses import free_ports
from services.common.errors import DeadlineExceeded, Unavailable
from services.common.ids import InstId, ReqId, Term
from services.gmanager import convert
from services.gmanager.board import Move
from services.gmanager.planner import MoveAnswer, MoveOrder
from services.gmanager.rmanager_client import issue_move
from tests.unit.gmanager.builders import make_info
from tests.unit.gmanager.fake_rmanager import FakeRManager, serving


def order_to(address: str) -> MoveOrder:
    source = replace(make_info(1, incarnation=11), control_address=address)
    move = Move(ReqId(7), 5, InstId(1), InstId(2))
    return MoveOrder(move, source, make_info(2, incarnation=22), Term(3))


async def test_the_source_learns_what_and_where() -> None:
    rmanager = FakeRManager(worker_pb2.MoveKvCacheResponse(accepted=True))
    async with serving(rmanager) as address:
        order = order_to(address)
        assert await issue_move(order) == MoveAnswer(accepted=True, reason="", highest_term=Term(0))
    (request,) = rmanager.requests
    assert (request.req_id, request.num_blocks, request.source_incarnation) == (7, 5, 11)
    assert request.term == 3
    assert request.dst == convert.info_to_proto(order.destination)


async def test_a_refusal_says_why() -> None:
    answer = worker_pb2.MoveKvCacheResponse(accepted=False, reason="finishing", highest_term=4)
    async with serving(FakeRManager(answer)) as address:
        assert await issue_move(order_to(address)) == MoveAnswer(False, "finishing", Term(4))


async def test_a_source_that_does_not_answer_costs_no_more_than_the_deadline() -> None:
    async with serving(FakeRManager(None)) as address:
        with pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(4.0):
                await issue_move(order_to(address))


async def test_a_source_that_is_gone_is_unavailable() -> None:
    (port,) = free_ports(1)
    with pytest.raises(Unavailable):
        await issue_move(order_to(f"127.0.0.1:{port}"))
