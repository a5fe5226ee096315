"""The body of a chat: messages, and the tools that answers may use. Used by the routes."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from services.common.errors import InvalidRequest
from services.common.sampling import MAX_LOGPROBS
from services.router.http.schemas import OpenAiBody, check_extra
from services.router.http.strict import Items, Strict
from services.router.http.tools import Tool, ToolCall, ToolChoice, tool_use
from services.router.request import CHAT_MAX_TOKENS, ChatPrompt, TextRequest
from services.router.tools.use import ToolUse

MAX_MESSAGES = 16_384


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None

    def check(self, param: str, call_ids: set[str]) -> None:
        """`call_ids`: of the calls before it; those that it brings are added."""
        check_extra(self.model_extra or {}, f"{param}.")
        is_caller = self.role == "assistant" and bool(self.tool_calls)
        if self.content is None and not is_caller:
            name = f"{param}.content"
            raise InvalidRequest(f"missing required parameter: {name}", param=name)
        if self.tool_calls and not is_caller:
            name = f"{param}.tool_calls"
            raise InvalidRequest(f"{name} are the assistant's", param=name)
        answered = self.tool_call_id
        is_linked = answered in call_ids if self.role == "tool" else answered is None
        if not is_linked:
            name = f"{param}.tool_call_id"
            wanted = "the id of a call before it, in a message of role tool"
            raise InvalidRequest(f"{name} must be {wanted}", param=name)
        call_ids.update(call.id for call in self.tool_calls or [])

    def for_template(self, param: str) -> dict[str, Any]:
        content = self.content
        if content is not None and not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        # Templates of open models know the older of the two words.
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        calls = [
            call.for_template(f"{param}.tool_calls[{index}]")
            for index, call in enumerate(self.tool_calls or [])
        ]
        called = {"tool_calls": calls} if calls else {}
        answered = {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return {"role": role, "content": content or "", **named, **called, **answered}


def chat_prompt(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> ChatPrompt:
    """Raises InvalidRequest naming a field of a message that is wrong."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must be 1 to {MAX_MESSAGES}", param="messages")
    call_ids: set[str] = set()
    told = []
    for index, message in enumerate(messages):
        message.check(f"messages[{index}]", call_ids)
        told.append(message.for_template(f"messages[{index}]"))
    return ChatPrompt(tuple(told), tuple(tool.model_dump(exclude_none=True) for tool in tools))


class ChatBody(OpenAiBody):
    messages: Items[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_fields(self) -> None:
        super().check_fields()
        _check_top_logprobs(self.top_logprobs, bool(self.logprobs))

    def without_prompt(self) -> Self:
        return self.model_copy(update={"messages": [], "tools": None})

    def to_request(self) -> TextRequest:
        max_tokens = self.max_completion_tokens
        tools = self._tool_use()
        return TextRequest(
            prompts=(chat_prompt(self.messages, self.tools or () if tools else ()),),
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            default_max_tokens=CHAT_MAX_TOKENS,
            tools=tools,
            **self.common(),
        )

    def _tool_use(self) -> ToolUse | None:
        is_parallel = self.parallel_tool_calls in (None, True)
        use = tool_use(self.tools or [], self.tool_choice, is_parallel)
        if use is not None and self.response_format and self.response_format.type != "text":
            param = "response_format"
            raise InvalidRequest(f"{param} does not go together with tools", param=param)
        return use


def _check_top_logprobs(top_logprobs: int | None, has_logprobs: bool) -> None:
    """Under its own name: the parameters further in know it as logprobs."""
    if top_logprobs is None:
        return
    if not 0 <= top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}", param="top_logprobs"
        )
    if top_logprobs and not has_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
