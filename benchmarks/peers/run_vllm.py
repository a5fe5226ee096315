"""Runs vLLM on a workload. `benchmarks.compare` starts it in vLLM's own virtual environment."""

import os
import sys
from pathlib import Path

from benchmarks.measure import measure
from benchmarks.peers.task import Task, answer

#: Those vLLM's handbook asks to preload on x86, where they are installed.
_LIBRARIES = ("**/libtcmalloc*.so*", "**/libiomp5.so")


#: Ample for 32 sequences of this model.
_KV_GIB = "2"


class Vllm:
    """A Subject: vLLM's engine stepped in this process, so that both cores compute."""

    def __init__(self, task: Task) -> None:
        from vllm import LLM

        self._engine = LLM(
            model=str(task.model),
            dtype=task.variant,
            max_model_len=task.workload.max_sequence_tokens,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        ).llm_engine
        self._req_ids: list[str] = []
        self._num_started = 0

    def start(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._req_ids = []
        for prompt in prompts:
            self._num_started += 1
            self._req_ids.append(str(self._num_started))
            self._engine.add_request(
                self._req_ids[-1], {"prompt_token_ids": prompt}, sampling.clone()
            )

    def step(self) -> int:
        num_tokens = 0
        while num_tokens == 0:
            outputs = self._engine.step()
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return num_tokens

    def finish(self) -> None:
        self._engine.abort_request(self._req_ids)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def prepare_process(task: Task) -> None:
    """Start this process over with the libraries and threads that vLLM itself would set up."""
    if "VLLM_ENABLE_V1_MULTIPROCESSING" in os.environ:
        return
    libraries = [str(path) for glob in _LIBRARIES for path in sorted(Path(sys.prefix).glob(glob))]
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: task.num_threads])
    environment = {
        "LD_PRELOAD": ":".join(libraries),
        "OMP_NUM_THREADS": str(task.num_threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": _KV_GIB,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **environment})


def main() -> None:
    task = Task.from_arguments(sys.argv[1:])
    prepare_process(task)
    answer(measure(Vllm(task), task.workload))


if __name__ == "__main__":
    main()
