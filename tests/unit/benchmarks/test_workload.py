"""The workload that every engine is given is the same, wherever it is made."""

from pathlib import Path

from benchmarks.peers.task import Task
from benchmarks.workload import Figures, Workload


def test_prompts_depend_on_the_seed_alone_and_share_no_prefix() -> None:
    workload = Workload()
    prompts = workload.prompts(8, 32, seed=1)
    assert prompts == Workload().prompts(8, 32, seed=1)
    assert prompts != workload.prompts(8, 32, seed=2)
    assert len({prompt[0] for prompt in prompts}) == 8
    assert all(0 <= token < workload.vocab_size for prompt in prompts for token in prompt)


def test_the_measured_steps_lie_around_the_context() -> None:
    for workload in (Workload(), Workload.quick()):
        first = workload.prompt_tokens + workload.num_warmup_steps
        last = first + workload.num_steps
        assert first <= workload.context_tokens <= last
        assert (first + last) / 2 == workload.context_tokens


def test_no_sequence_ends_while_it_is_measured() -> None:
    # An engine may finish the prompts of a batch one by one; the first ones decode meanwhile.
    workload = Workload()
    needed = workload.num_warmup_steps + workload.num_steps + max(workload.decode_batches)
    assert workload.max_new_tokens >= needed


def test_blocks_needed_hold_the_largest_batch_and_the_longest_prompt() -> None:
    workload = Workload()
    num_tokens = 16 * workload.blocks_needed(16)
    assert num_tokens >= 32 * (workload.prompt_tokens + workload.max_new_tokens)
    assert num_tokens > max(workload.prefill_tokens)


def test_a_task_survives_the_command_line() -> None:
    task = Task(Path("/models/small one"), "bfloat16", 2, Workload.quick())
    assert Task.from_arguments(task.arguments()) == task


def test_figures_survive_json_and_become_rates() -> None:
    figures = Figures({1: 0.02, 8: 0.04}, {512: 0.5})
    assert Figures.from_json(figures.to_json()) == figures
    assert figures.decode_tokens_per_s == {1: 50.0, 8: 200.0}
    assert figures.prefill_tokens_per_s == {512: 1024.0}
