"""Records of the planner's decisions as protos. Called by `server`."""

from protos.infinite_llm.v1 import gmanager_pb2
from services.gmanager.audit import Answer, Record
from services.gmanager.board import Move
from services.gmanager.perf_model import OperatingPoint
from services.gmanager.policy import Verdict

_NO_ANSWER = Answer("", "")


def decision_to_proto(record: Record, now_s: float) -> gmanager_pb2.Decision:
    decision = record.decision
    return gmanager_pb2.Decision(
        debtor=decision.debtor,
        is_move=decision.verdict is Verdict.MOVE,
        verdict=decision.verdict,
        req_id=decision.req_id or 0,
        gain_tokens_per_s=decision.gain_tokens_per_s,
        moves=[_move(move, record.answers.get(move, _NO_ANSWER)) for move in decision.moves],
        changes=[
            gmanager_pb2.ModelledChange(
                inst_id=change.inst_id, before=_terms(change.before), after=_terms(change.after)
            )
            for change in decision.changes
        ],
        times=record.times,
        first_age_s=now_s - record.first_s,
        last_age_s=now_s - record.last_s,
    )


def _move(move: Move, answer: Answer) -> gmanager_pb2.DecidedMove:
    return gmanager_pb2.DecidedMove(
        destination=move.destination,
        num_blocks=move.num_blocks,
        outcome=answer.outcome,
        reason=answer.reason,
    )


def _terms(point: OperatingPoint) -> gmanager_pb2.ModelTerms:
    return gmanager_pb2.ModelTerms(
        batch=point.batch,
        non_attention_s=point.non_attention_s,
        attention_s=point.attention_s,
        link_s=point.link_s,
        tokens_per_s=point.tokens_per_s,
    )
