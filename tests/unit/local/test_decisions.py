"""Drawing what the planner decided, for people."""

from rich.console import Console

from protos.infinite_llm.v1 import gmanager_pb2
from services.local.decisions import draw_decisions


def text_of(*decisions: gmanager_pb2.Decision) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(draw_decisions(list(decisions)))
    return capture.get()


def test_a_move_is_told_with_its_answer_and_the_terms_of_the_model() -> None:
    before = gmanager_pb2.ModelTerms(batch=2, non_attention_s=0.012, tokens_per_s=147.06)
    after = gmanager_pb2.ModelTerms(batch=8, non_attention_s=0.018, tokens_per_s=408.2)
    text = text_of(
        gmanager_pb2.Decision(
            debtor=1,
            is_move=True,
            verdict="more throughput",
            req_id=7,
            gain_tokens_per_s=261.1,
            moves=[gmanager_pb2.DecidedMove(destination=2, num_blocks=60, outcome="refused",
                                            reason="full")],
            changes=[gmanager_pb2.ModelledChange(inst_id=1, before=before, after=after)],
            times=1,
            last_age_s=3.0,
        )
    )  # fmt: skip
    assert "instance 1: moved, more throughput, request 0000000000000007, +261.1 tok/s" in text
    assert "(3 s ago)" in text
    assert "60 blocks to instance 2: refused (full)" in text
    assert "2 > 8" in text
    assert "12.00 > 18.00" in text


def test_what_was_decided_again_and_again_says_so() -> None:
    text = text_of(
        gmanager_pb2.Decision(
            debtor=1, verdict="nobody has room", times=9, first_age_s=20.0, last_age_s=1.0
        )
    )
    assert "instance 1: not moved, nobody has room (1 s ago, 9 times since 20 s ago)" in text


def test_no_decision_says_so() -> None:
    assert "nothing was decided" in text_of()
