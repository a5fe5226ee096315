"""Tells rManagers to move blocks: the gManager's only calls to workers. Used by `planner`."""

import grpc

from protos.infinite_llm.v1 import worker_pb2, worker_pb2_grpc
from services.common.ids import Term
from services.common.rpc import error_from_rpc, open_channel
from services.gmanager import convert
from services.gmanager.planner import MoveAnswer, MoveOrder

MOVE_DEADLINE_S = 2.0


async def issue_move(order: MoveOrder) -> MoveAnswer:
    """One call on a channel of its own: moves are rare, and workers come and go."""
    request = worker_pb2.MoveKvCacheRequest(
        req_id=order.move.req_id,
        num_blocks=order.move.num_blocks,
        dst=convert.info_to_proto(order.destination),
        source_incarnation=order.source.incarnation,
        term=order.term,
    )
    async with open_channel(order.source.control_address) as channel:
        stub: worker_pb2_grpc.RManagerAsyncStub = worker_pb2_grpc.RManagerStub(channel)
        try:
            response = await stub.MoveKvCache(request, timeout=MOVE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
    return MoveAnswer(response.accepted, response.reason, Term(response.highest_term))
