"""`python -m benchmarks.perplexity`: what each type of the weights makes of a fixed text.

The text is the licence, which no version of the project changes, in pieces of 512 tokens.
"""

import os
import sys
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer

from benchmarks.command import new_parser, run
from benchmarks.report import Report
from kernels import PagedRows, StepKv, select
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.worker.models.llama import LlamaFamilyModel, PackedTokens
from services.worker.models.load import WeightDtype, load_model

_TEXT = Path(__file__).parent.parent / "LICENSE"
_PIECE_TOKENS = 512
_BLOCK_SIZE = 16


def main(arguments: list[str]) -> None:
    parser, report = new_parser("perplexity", __doc__), Report()
    options = parser.parse_args(arguments)
    folder = resolve(DEFAULT_MODEL, default_cache_dir(os.environ), report.say)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(_TEXT.read_text(encoding="utf-8")).ids
    report.machine(options.threads)
    kernels = select("cpu", options.threads)
    found = {
        dtype: round(perplexity(load_model(folder, dtype, "cpu", kernels), ids), 4)
        for dtype in get_args(WeightDtype)
    }
    rows = [(dtype, f"{value:.4f}") for dtype, value in found.items()]
    report.table(f"Perplexity of {len(ids)} tokens", ("weights", "perplexity"), rows)
    report.last_line({"perplexity": found})


def perplexity(model: LlamaFamilyModel, token_ids: list[int]) -> float:
    """exp of the mean surprise at each token, given those before it in its piece."""
    pieces = [torch.tensor(p) for p in batched(token_ids, _PIECE_TOKENS)]
    surprises = [surprise(model, piece) for piece in pieces if len(piece) > 1]
    return float(torch.cat(surprises).mean().exp())


def surprise(model: LlamaFamilyModel, token_ids: torch.Tensor) -> torch.Tensor:
    """-log p of all tokens but the first."""
    num, config = len(token_ids), model.config
    num_blocks = -(-num // _BLOCK_SIZE)
    pool = torch.zeros(
        num_blocks, config.num_layers, 2, config.num_kv_heads, _BLOCK_SIZE, config.head_dim
    )
    rows = PagedRows.build(
        [num], [range(num_blocks)], [num],
        causal=True, num_blocks=num_blocks, block_size=_BLOCK_SIZE,
    )  # fmt: skip
    every = torch.arange(num)
    logits = model.forward(PackedTokens(token_ids, every, every), StepKv(pool, every, rows))
    return torch.nn.functional.cross_entropy(logits[:-1], token_ids[1:], reduction="none")


def batched(token_ids: list[int], size: int) -> list[list[int]]:
    return [token_ids[start : start + size] for start in range(0, len(token_ids), size)]


if __name__ == "__main__":
    sys.exit(run(main))
