"""What `/openapi.json` says of the routes, which read and answer without the framework's help.

Used by the app.
"""

from typing import Any

from services.router.http.request_body import RequestBody

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def responses_of(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """200 in one of these, or any other status with an error body."""
    good: dict[str, Any] = {media_type: {"schema": {}} for media_type in media_types}
    bad = {"application/json": {"schema": _ERROR}}
    return {
        200: {"description": "Done", "content": good},
        "default": {"description": "An error", "content": bad},
    }


def request_of(body: type[RequestBody], model: str) -> dict[str, Any]:
    """Complete in itself: references would lead out of the part of the document where it stands."""
    schema = body.model_json_schema()
    # What may be left out may also be null.
    is_required = "model" in schema.get("required", ())
    schema["properties"]["model"] = {"enum": [model] if is_required else [model, None]}
    inlined = _inlined(schema, schema.pop("$defs", {}))
    content = {"application/json": {"schema": inlined}}
    return {"requestBody": {"content": content, "required": True}}


def _inlined(part: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(part, list):
        return [_inlined(item, definitions) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in part.items()}
