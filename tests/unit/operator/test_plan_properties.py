"""Whatever there is and whatever happens: it converges, and nobody in use is taken away."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.operator.plan import Wanted
from services.operator.pods import Pod
from tests.unit.operator.simulation import Cluster, Truth

HASHES = ("old", "older", "new")


@st.composite
def wishes(draw: st.DrawFn) -> Wanted:
    return Wanted(
        draw(st.integers(0, 5)), draw(st.integers(1, 3)), draw(st.sampled_from([2.0, 20.0])), "new"
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """In any state at all."""
    cluster = Cluster(draw(wishes()))
    for inst_id in draw(st.lists(st.integers(0, 9), unique=True, max_size=7)):
        name = f"x-w-{inst_id}"
        is_running = draw(st.booleans())
        is_started = is_running and draw(st.booleans())
        truth = Truth(
            lent=draw(st.integers(0, 40)) if is_started else 0,
            requests=draw(st.integers(0, 5)) if is_started else 0,
            is_draining=is_started and draw(st.booleans()),
            age_s=100 if is_started else 0,
        )
        is_finished = not is_running and draw(st.booleans())
        pod = Pod(
            name, name, inst_id, draw(st.sampled_from(HASHES)), 500.0 + inst_id, f"{name}:7100",
            is_terminating=draw(st.integers(0, 5)) == 0,
            is_finished=is_finished,
            finished_at_s=draw(st.floats(500, 1000)) if is_finished else 0.0,
            num_failures=draw(st.integers(0, 8)),
            is_running=is_running,
            is_started=is_started,
            is_ready=is_started and not truth.is_draining and draw(st.booleans()),
            drain_deadline_s=draw(st.none() | st.floats(900, 1100)) if is_running else None,
        )  # fmt: skip
        cluster.add(pod, truth)
    return cluster


@settings(deadline=None, max_examples=80)
@given(clusters())
def test_it_converges_from_any_state(cluster: Cluster) -> None:
    cluster.settle()


@settings(deadline=None, max_examples=80)
@given(clusters(), st.data())
def test_it_converges_after_anything_has_happened(cluster: Cluster, data: st.DataObject) -> None:
    """Each step checks that nobody in use is deleted, nor more taken away than is allowed."""
    for _ in range(data.draw(st.integers(1, 25))):
        names = sorted(name for name in cluster.pods if not cluster.truths[name].is_lost)
        event = data.draw(
            st.sampled_from(["", "scale", "template", "view", "crash", "fail", "lose", "mark"])
        )
        if event == "scale":
            cluster.wanted = replace(cluster.wanted, replicas=data.draw(st.integers(0, 6)))
        elif event == "template":
            cluster.wanted = replace(
                cluster.wanted, template_hash=data.draw(st.sampled_from(HASHES))
            )
        elif event == "view":
            cluster.is_view_away = not cluster.is_view_away
        elif names and event:
            name = data.draw(st.sampled_from(names))
            {
                "crash": cluster.crash,
                "fail": cluster.fail,
                "lose": cluster.lose,
                "mark": cluster.lose_mark,
            }[event](name)
        for truth in cluster.truths.values():
            if not truth.is_draining and truth.age_s > 3:
                truth.lent, truth.requests = data.draw(
                    st.tuples(st.integers(0, 20), st.integers(0, 3))
                )
        cluster.step()
        cluster.tick(data.draw(st.sampled_from([0.0, 1.0, 30.0])))
    cluster.is_view_away = False
    cluster.settle()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=1, max_size=8))
def test_the_last_wish_of_many_holds(scales: list[tuple[int, int]]) -> None:
    cluster = Cluster(Wanted(3, 1, 5.0, "new"))
    cluster.settle()
    for seconds, replicas in scales:
        cluster.wanted = replace(cluster.wanted, replicas=replicas)
        for _ in range(seconds):
            cluster.step()
            cluster.tick()
    cluster.settle()
    assert len(cluster.serving) == scales[-1][1]
