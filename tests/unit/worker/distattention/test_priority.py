import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.worker.distattention.priority import run_at_once


def policy_of_a_thread() -> int:
    run_at_once()
    return os.sched_getscheduler(0)


def test_only_the_thread_that_asks_runs_at_once() -> None:
    with ThreadPoolExecutor(1) as thread:
        policy = thread.submit(policy_of_a_thread).result()
    assert policy in (os.SCHED_RR, os.SCHED_OTHER)  # the latter where we may not
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_who_may_not_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    run_at_once()
