"""The rig runs the worker's real engine, and the profile accounts for all of its time."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.engine_rig import EngineRig, running
from benchmarks.profile import OVERHEAD_PHASES, PHASES, REST, TIMED, profile_decode
from benchmarks.workload import Workload
from services.common.errors import Overloaded
from services.worker.config import Config
from services.worker.core import Core, build_core
from services.worker.engine.engine import Engine
from tests.unit.benchmarks.tiny_model import VOCAB_SIZE, save_tiny_model

_CONFIG = Config(inst_id=0, model="tiny", num_blocks=32)
_WORKLOAD = replace(
    Workload(),
    decode_batches=(1, 3),
    context_tokens=24,
    prefill_tokens=(32,),
    num_warmup_steps=1,
    num_steps=4,
    vocab_size=VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    before = torch.get_num_threads()
    yield build_core(_CONFIG, save_tiny_model(tmp_path_factory.mktemp("tiny")))
    torch.set_num_threads(before)


def test_the_rig_generates_until_it_is_told_to_finish(core: Core) -> None:
    prompts = _WORKLOAD.prompts(3, 20, seed=0)
    with running(EngineRig(_CONFIG, core)) as rig:
        rig.start(prompts, max_new_tokens=50)
        counts = [rig.step() for _ in range(6)]
        rig.finish()
        assert core.pool.num_free == _CONFIG.num_blocks
        rig.start(prompts[:1], max_new_tokens=1)
        assert rig.step() == 1
    assert counts == [3] * 6


def test_a_request_that_fails_fails_the_benchmark(core: Core) -> None:
    impatient = replace(_CONFIG, queue_timeout_s=1e-6)
    too_long = _WORKLOAD.prompts(1, 16 * (_CONFIG.num_blocks + 1), seed=0)
    with running(EngineRig(impatient, core)) as rig:
        rig.start(too_long, max_new_tokens=1)
        with pytest.raises(Overloaded):
            rig.step()


def test_a_profile_has_every_phase_and_puts_the_engine_back(core: Core) -> None:
    originals = [getattr(owner, name) for owner, name, _ in TIMED]
    step = Engine._step
    with running(EngineRig(_CONFIG, core)) as rig:
        spent = profile_decode(rig, _WORKLOAD, batch=3)
    assert set(spent) == {*PHASES, REST}
    assert all(seconds > 0.0 for seconds in spent.values())
    assert sum(spent[phase] for phase in OVERHEAD_PHASES) < sum(spent.values())
    assert [getattr(owner, name) for owner, name, _ in TIMED] == originals
    assert Engine._step is step
