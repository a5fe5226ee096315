"""Reads request bodies, and checks them. Used by the OpenAI routes and the body parser."""

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from services.common.errors import InvalidRequest
from services.router.http.disconnect import ClientDisconnected
from services.router.http.errors import BodyTooLarge, BodyTooSlow
from services.router.http.request_body import RequestBody

#: A whole body must have arrived by then.
BODY_DEADLINE_S = 60.0

Body = TypeVar("Body", bound=RequestBody)

# What pydantic says of a value that fits no branch of a union names every branch; this is shorter.
_UNIONS = {
    "prompt": "must be a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "must be a string or a list of strings",
    "content": "must be a string or a list of text parts",
    "tool_choice": 'must be "none", "auto", "required" or a function',
}


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    too_large = BodyTooLarge(f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > max_bytes:
                    raise too_large
    except ClientDisconnect:
        raise ClientDisconnected from None
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive in {BODY_DEADLINE_S:g} s") from None
    return bytes(raw)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Returns the checked body; raises InvalidRequest naming the field at fault.

    Blocks, and with it all threads of the process, for as long as a large body takes.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        # Without input and context: a message must not repeat the prompt.
        raise _invalid(error) from None
    body.check_fields()
    return body


def _invalid(error: ValidationError) -> InvalidRequest:
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    if errors[0]["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {errors[0]['msg']}")
    # Of a union's branches the one that matched down to a field says best what is wrong.
    first = max(errors, key=lambda entry: sum(map(_is_name, entry["loc"])))
    names = [part for part in first["loc"] if isinstance(part, int) or _is_name(part)]
    if names[:1] == ["logit_bias"]:
        del names[1:]  # its keys are data
    if not names:
        return InvalidRequest("the body must be a JSON object")
    param = _path(names)
    if first["type"] == "missing":
        return InvalidRequest(f"missing required parameter: {param}", param=param)
    is_union = len(first["loc"]) > len(names)
    wanted = _UNIONS.get(str(names[-1])) if is_union else None
    return InvalidRequest(f"{param}: {wanted or first['msg']}", param=param)


def _is_name(part: int | str) -> bool:
    # Branches of unions appear in the path as types: `str`, `list[int]`, `NamedTool`.
    return isinstance(part, str) and "[" not in part and part != "str" and part.islower()


def _path(names: list[int | str]) -> str:
    path = str(names[0])
    for name in names[1:]:
        path += f"[{name}]" if isinstance(name, int) else f".{name}"
    return path
