"""Plans are admitted in terms that never fall."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import Term
from services.worker.rmanager.fence import Fence


@settings(deadline=None)
@given(st.lists(st.integers(0, 5).map(Term)))
def test_admitted_terms_never_fall(terms: list[Term]) -> None:
    fence = Fence()
    admitted = [term for term in terms if fence.admits(term)]
    assert admitted == sorted(admitted)
    assert fence.highest_term == max(terms, default=0)
