"""The constants of the performance model as heartbeats bring them, refined while the worker runs.

The one writer of the instance's `perf` once it serves; called with each heartbeat.
"""

from collections.abc import Iterable, Mapping

from protos.infinite_llm.v1 import types_pb2
from services.common.ids import InstId
from services.worker.distattention.link_terms import LinkBook, LinkTerms
from services.worker.engine.engine import EngineSnapshot
from services.worker.perf_estimator import PerfEstimator, set_step_constants, step_constants

#: The gManager is told when a constant of the performance model is off by more.
_NEWS_SHARE = 0.05
#: Links vary with what else goes over them.
_LINK_NEWS_SHARE = 0.25


class PerfReport:
    def __init__(self, perf: types_pb2.PerfConstants, links: LinkBook) -> None:
        self._perf = perf
        self._links = links
        self._estimator = PerfEstimator(step_constants(perf)) if perf.non_attention else None
        self._learnt_step = 0

    def refresh(self, snapshot: EngineSnapshot) -> None:
        self._learn(snapshot)
        terms = {peer.inst_id: terms for peer, terms in self._links.terms().items()}
        if _is_news(self._perf.links, terms):
            del self._perf.links[:]
            self._perf.links.extend(
                types_pb2.LinkTerms(
                    inst_id=inst_id, round_trip_s=link.round_trip_s, bytes_per_s=link.bytes_per_s
                )
                for inst_id, link in sorted(terms.items())
            )

    def _learn(self, snapshot: EngineSnapshot) -> None:
        """A step in which everybody decoded, with every block here, tells what steps cost now."""
        is_plain = 0 < snapshot.step_tokens == snapshot.num_running and not snapshot.borrowed_blocks
        estimator, perf = self._estimator, self._perf
        if estimator is None or not is_plain or snapshot.steps == self._learnt_step:
            return
        self._learnt_step = snapshot.steps
        estimator.observe(snapshot.num_running, snapshot.running_tokens, snapshot.step_s)
        if estimator.constants.differs_from(step_constants(perf), _NEWS_SHARE):
            set_step_constants(perf, estimator.constants)


def _is_news(told: Iterable[types_pb2.LinkTerms], known: Mapping[InstId, LinkTerms]) -> bool:
    before = {link.inst_id: link for link in told}
    return before.keys() != known.keys() or any(
        _is_off(before[i].round_trip_s, link.round_trip_s)
        or _is_off(before[i].bytes_per_s, link.bytes_per_s)
        for i, link in known.items()
    )


def _is_off(told: float, known: float) -> bool:
    return abs(told - known) > _LINK_NEWS_SHARE * known
