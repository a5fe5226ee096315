"""The text side of the model that the cluster serves. Loaded once at start, used by generation."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.router.grammars.checks import GrammarChecks
from services.router.request import ChatPrompt, Prompt
from services.router.text.chat_template import ChatTemplate
from services.router.text.tokenizer import Tokenizer, TooManyTokens
from services.router.tools.syntax import JSON_LIST, CallSyntax


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    created: int
    """Unix seconds of the model's files, as /v1/models shows it."""
    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: GrammarChecks

    @classmethod
    def load(cls, folder: Path, name: str) -> "ServedModel":
        return cls(
            name=name,
            created=int(folder.stat().st_mtime),
            tokenizer=Tokenizer.load(folder),
            template=ChatTemplate.load(folder),
            grammars=GrammarChecks(folder),
        )

    @property
    def call_syntax(self) -> CallSyntax:
        """How it writes that functions are to be called."""
        return JSON_LIST if self.template is None else self.template.call_syntax

    async def tokens_of(self, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        """Returns the prompt's tokens. Refuses what cannot have as few as `max_tokens`, early."""
        if isinstance(prompt, tuple):
            if len(prompt) > max_tokens:
                raise _too_long(str(len(prompt)), max_tokens, "prompt")
            return await self.tokenizer.in_encode_thread(lambda: self._checked(prompt))
        if isinstance(prompt, str):
            text, param = prompt, "prompt"
        else:
            text, param = await self._render(prompt), "messages"
        num_tokens = self.tokenizer.min_tokens(text)
        if num_tokens > max_tokens:
            raise _too_long(f"at least {num_tokens}", max_tokens, param)
        is_plain = isinstance(prompt, str)
        try:
            token_ids = await self.tokenizer.encode(text, is_plain, max_tokens)
        except TooManyTokens as error:
            raise _too_long(str(error.num_tokens), max_tokens, param) from None
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens", param=param)
        return token_ids

    async def tokenize(
        self, prompt: str | ChatPrompt, add_special_tokens: bool, max_tokens: int
    ) -> tuple[int, ...]:
        """For whoever only asks, of a prompt that may have no tokens."""
        if isinstance(prompt, str):
            text, param = prompt, "prompt"
        else:
            text, param = await self._render(prompt), "messages"
        try:
            return await self.tokenizer.encode(text, add_special_tokens, max_tokens)
        except TooManyTokens as error:
            message = f"more tokens ({error.num_tokens}) than one answer tells ({max_tokens})"
            raise InvalidRequest(message, param=param) from None

    def check_token_ids(self, token_ids: Collection[int], param: str) -> None:
        last = self.tokenizer.vocab_size - 1
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= last:
            raise InvalidRequest(f"token ids must be between 0 and {last}", param=param)

    def _checked(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        self.check_token_ids(token_ids, "prompt")
        return token_ids

    async def _render(self, prompt: ChatPrompt) -> str:
        template = self.template
        if template is None:
            raise InvalidRequest(f"model {self.name} has no chat template", param="messages")
        return await self.tokenizer.in_encode_thread(
            lambda: template.render(prompt.messages, prompt.tools)
        )


def _too_long(num_tokens: str, max_tokens: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {num_tokens} tokens, but one request can use {max_tokens} tokens here",
        param=param,
    )
