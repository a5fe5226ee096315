"""Who leads: every state x event, and that no two plans overlap whatever Redis forgets."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import Term
from services.gmanager.leadership import Claim, Leadership, Role

LEASE_S = 4.0
NOW_S = 100.0
MINE, RIVALS = Term(10), Term(20)
L, F, S = Role.LEADER, Role.FOLLOWER, Role.STAND_IN

Change = Callable[[Leadership], None]


def mine(at_s: float, term: Term = MINE) -> Change:
    claim = Claim(True, "me", term, LEASE_S)
    return lambda leadership: leadership.on_claim(claim, at_s, at_s)


def rivals(at_s: float) -> Change:
    claim = Claim(False, "rival", RIVALS, LEASE_S)
    return lambda leadership: leadership.on_claim(claim, at_s, at_s)


STATES: dict[str, list[Change]] = {
    "nobody heard of": [],
    "won": [mine(NOW_S)],
    "leading": [mine(NOW_S - 3), mine(NOW_S - 1)],
    "lease over": [mine(NOW_S - 5), mine(NOW_S - 3)],
    "led": [rivals(NOW_S - 1)],
    "rival's lease over": [rivals(NOW_S - 5)],
}
EVENTS: dict[str, Change] = {
    "nothing": lambda leadership: None,
    "renewed": mine(NOW_S),
    "won again": mine(NOW_S, Term(30)),
    "rival leads": rivals(NOW_S),
    "silence": lambda leadership: leadership.on_silence(NOW_S),
    "old term": lambda leadership: leadership.on_term(Term(9)),
    "higher term": lambda leadership: leadership.on_term(Term(40)),
    "resigned": lambda leadership: leadership.resign(),
}
#: State x event: the role, the term that is told, and whether moves may be ordered.
EXPECTED: dict[str, dict[str, tuple[Role, int, bool]]] = {
    "nobody heard of": {
        "nothing": (S, 0, False), "renewed": (L, 10, False), "won again": (L, 30, False),
        "rival leads": (F, 0, False), "silence": (S, 0, False), "old term": (S, 0, False),
        "higher term": (S, 0, False), "resigned": (S, 0, False),
    },
    "won": {
        "nothing": (L, 10, False), "renewed": (L, 10, False), "won again": (L, 30, False),
        "rival leads": (F, 0, False), "silence": (L, 10, False), "old term": (L, 10, False),
        "higher term": (S, 0, False), "resigned": (S, 0, False),
    },
    "leading": {
        "nothing": (L, 10, True), "renewed": (L, 10, True), "won again": (L, 30, False),
        "rival leads": (F, 0, False), "silence": (L, 10, True), "old term": (L, 10, True),
        "higher term": (S, 0, False), "resigned": (S, 0, False),
    },
    "lease over": {
        "nothing": (S, 0, False), "renewed": (L, 10, True), "won again": (L, 30, False),
        "rival leads": (F, 0, False), "silence": (S, 0, False), "old term": (S, 0, False),
        "higher term": (S, 0, False), "resigned": (S, 0, False),
    },
    "led": {
        "nothing": (F, 0, False), "renewed": (L, 10, False), "won again": (L, 30, False),
        "rival leads": (F, 0, False), "silence": (F, 0, False), "old term": (F, 0, False),
        "higher term": (F, 0, False), "resigned": (S, 0, False),
    },
    "rival's lease over": {
        "nothing": (F, 0, False), "renewed": (L, 10, False), "won again": (L, 30, False),
        "rival leads": (F, 0, False), "silence": (S, 0, False), "old term": (F, 0, False),
        "higher term": (F, 0, False), "resigned": (S, 0, False),
    },
}  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_every_state_and_event(state: str, event: str) -> None:
    leadership = Leadership(LEASE_S)
    for change in (*STATES[state], EVENTS[event]):
        change(leadership)
    role, term, plans = EXPECTED[state][event]
    assert leadership.role(NOW_S) is role
    assert leadership.term(NOW_S) == term
    assert leadership.planning_term(NOW_S) == (term if plans else None)
    assert leadership.leader_address == ("rival" if role is F else "")


def test_a_winner_plans_after_half_a_lease_and_a_holder_for_half_a_lease() -> None:
    leadership = Leadership(LEASE_S)
    mine(0.0)(leadership)
    assert leadership.planning_term(1.9) is None
    mine(1.0)(leadership)
    assert leadership.planning_term(2.0) == MINE
    assert leadership.planning_term(2.9) == MINE
    assert leadership.planning_term(3.0) is None


def test_a_late_answer_counts_from_the_question() -> None:
    leadership = Leadership(LEASE_S)
    claim = Claim(True, "me", MINE, LEASE_S)
    leadership.on_claim(claim, asked_at_s=0.0, now_s=2.5)
    assert leadership.role(2.5) is Role.STAND_IN


def test_the_next_term_is_asked_for_above_all_that_were_heard_of() -> None:
    leadership = Leadership(LEASE_S)
    for change, highest in ((mine(0.0), 10), (rivals(1.0), 20), (mine(2.0), 20)):
        change(leadership)
        assert leadership.highest_term == highest
    leadership.on_term(Term(30))
    assert leadership.highest_term == 30


def test_who_has_no_rival_leads_for_ever_and_above_what_workers_heard() -> None:
    sole = Leadership.sole(Term(5))
    assert (sole.role(0.0), sole.planning_term(0.0)) == (Role.LEADER, 5)
    sole.on_term(Term(4))
    assert sole.planning_term(1e9) == 5
    sole.on_term(Term(7))
    assert sole.planning_term(1e9) == 8
    sole.resign()
    assert sole.planning_term(1e9) is None


@dataclass
class ForgetfulRedis:
    """A lease as `redis_lease` keeps it, that may be lost at any moment."""

    holder: int | None = None
    until_s: float = 0.0
    term: int = 0

    def claim(self, who: int, known: int, now_s: float) -> Claim:
        if self.holder != who and (self.holder is None or now_s >= self.until_s):
            self.term = max(self.term, known) + 1
            self.holder = who
        if self.holder == who:
            self.until_s = now_s + LEASE_S
        return Claim(self.holder == who, str(self.holder), Term(self.term), self.until_s - now_s)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "forget"]),
        st.integers(0, 2),
        st.floats(0.0, 2.0),
        st.floats(0.0, 1.0),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_no_two_plan_at_once_even_where_redis_forgets(
    steps: list[tuple[str, int, float, float]],
) -> None:
    redis, rivals = ForgetfulRedis(), [Leadership(LEASE_S) for _ in range(3)]
    now_s = 0.0
    for what, who, pause_s, delay_s in steps:
        now_s += pause_s
        if what == "forget":
            redis = ForgetfulRedis(term=redis.term)
        else:
            asked_at_s = now_s
            claim = redis.claim(who, rivals[who].highest_term, asked_at_s + delay_s / 2)
            now_s += delay_s
            rivals[who].on_claim(claim, asked_at_s, now_s)
        assert sum(rival.planning_term(now_s) is not None for rival in rivals) <= 1
