"""The model's tokenizer, away from the event loop. Owned by the process, used by generation.

Two pools: a huge prompt being encoded must not hold up the text of running streams.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import tokenizers

from services.common.errors import ConfigError
from services.router.text.token_bytes import TokenBytes

T = TypeVar("T")

NUM_ENCODE_THREADS = 2
NUM_DECODE_THREADS = 1


class TooManyTokens(Exception):
    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class Tokenizer:
    """Encodes prompts and decodes answers in threads; owner of both pools."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int | None = None) -> None:
        # A saved tokenizer may truncate or pad; prompts are taken as they are.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = vocab_size or max(vocab.values()) + 1
        self.token_bytes = TokenBytes(tokenizer).of
        """What one token stands for; nearly free, but many of them are not."""
        self._longest_token = max(map(len, vocab))
        self._encode_pool = ThreadPoolExecutor(NUM_ENCODE_THREADS, "encode")
        self._decode_pool = ThreadPoolExecutor(NUM_DECODE_THREADS, "decode")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json")
        model = json.loads((folder / "config.json").read_text("utf-8"))
        return cls(tokenizers.Tokenizer.from_file(str(path)), model.get("vocab_size"))

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without encoding."""
        return len(text) // self._longest_token

    async def encode(
        self, text: str, add_special_tokens: bool, max_tokens: int = sys.maxsize
    ) -> tuple[int, ...]:
        """Raises TooManyTokens."""

        def work() -> tuple[int, ...]:
            # `encode` keeps all other threads waiting, for seconds; a batch does not.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            if len(encoding) > max_tokens:
                raise TooManyTokens(len(encoding))
            return tuple(encoding.ids)

        return await self.in_encode_thread(work)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Blocking; call it from a decode thread."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of all of them, special tokens included."""

        def work() -> str:
            # As in `encode`: a batch lets other threads run.
            (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
            return str(text)

        return await self.in_encode_thread(work)

    def piece(self, token_id: int) -> str:
        """As the vocabulary writes it."""
        return self._tokenizer.id_to_token(token_id) or ""

    async def in_encode_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._encode_pool, work)

    async def in_decode_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decode_pool, work)

    def close(self) -> None:
        self._encode_pool.shutdown(wait=False, cancel_futures=True)
        self._decode_pool.shutdown(wait=False, cancel_futures=True)
