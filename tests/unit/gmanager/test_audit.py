"""The log of decisions: what repeats shares a record, memory is bounded, everything is found."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import InstId, ReqId
from services.gmanager.audit import Answer, DecisionLog
from services.gmanager.board import Move
from services.gmanager.policy import Decision, Verdict

ACCEPTED = Answer("accepted", "")


def decision(
    debtor: int, verdict: Verdict = Verdict.NO_CREDITOR, req_id: int = 7, creditor: int = 0
) -> Decision:
    moves = (Move(ReqId(req_id), 4, InstId(debtor), InstId(creditor)),) if creditor else ()
    return Decision(InstId(debtor), verdict, ReqId(req_id), moves)


def test_what_is_decided_again_and_again_is_one_record() -> None:
    log = DecisionLog()
    for now_s in (1.0, 2.0, 3.0):
        log.note(decision(1), now_s)
    (record,) = log.find()
    assert (record.first_s, record.last_s, record.times) == (1.0, 3.0, 3)


def test_every_move_is_a_record_of_its_own() -> None:
    log = DecisionLog()
    log.note(decision(1, Verdict.MOVE, creditor=2), 1.0)
    log.note(decision(1, Verdict.MOVE, creditor=2), 9.0)
    assert [record.last_s for record in log.find()] == [9.0, 1.0]


def test_another_reason_or_request_is_another_record() -> None:
    log = DecisionLog()
    log.note(decision(1), 1.0)
    log.note(decision(1, Verdict.NO_GAIN), 2.0)
    log.note(decision(1, Verdict.NO_GAIN, req_id=8), 3.0)
    assert [record.times for record in log.find()] == [1, 1, 1]


def test_the_answer_is_kept_with_its_move() -> None:
    log = DecisionLog()
    moved = decision(1, Verdict.MOVE, creditor=2)
    log.note(moved, 1.0)
    log.note_answer(moved.moves[0], ACCEPTED)
    log.note_answer(decision(5, Verdict.MOVE, creditor=2).moves[0], ACCEPTED)  # of nobody we know
    assert log.find()[0].answers == {moved.moves[0]: ACCEPTED}


def test_decisions_are_found_by_request_and_by_either_side() -> None:
    log = DecisionLog()
    log.note(decision(1, Verdict.MOVE, req_id=7, creditor=2), 1.0)
    log.note(decision(3, Verdict.NO_GAIN, req_id=8, creditor=2), 2.0)
    log.note(decision(4, req_id=9), 3.0)

    def debtors(req_id: int | None = None, inst_id: int | None = None, limit: int = 9) -> list[int]:
        found = log.find(
            None if req_id is None else ReqId(req_id),
            None if inst_id is None else InstId(inst_id),
            limit,
        )
        return [record.decision.debtor for record in found]

    assert debtors() == [4, 3, 1]
    assert debtors(limit=2) == [4, 3]
    assert debtors(req_id=7) == [1]
    assert debtors(inst_id=2) == [3, 1]
    assert debtors(inst_id=4) == [4]
    assert debtors(req_id=7, inst_id=3) == []


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.sampled_from([Verdict.MOVE, Verdict.RESTING, Verdict.NO_GAIN]),
        ),
        max_size=60,
    )
)
def test_the_newest_are_kept_and_no_more_than_fit(events: list[tuple[int, Verdict]]) -> None:
    log, unbounded = DecisionLog(capacity=4), DecisionLog(capacity=1000)
    for now_s, (debtor, verdict) in enumerate(events):
        for each in (log, unbounded):
            each.note(decision(debtor, verdict, creditor=9), now_s)
    kept = [(r.decision, r.last_s) for r in log.find()]
    assert kept == [(r.decision, r.last_s) for r in unbounded.find()][:4]
