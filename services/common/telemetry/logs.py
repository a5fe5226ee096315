"""Structured logs: one JSON object a line on stderr, with the id of the request at hand."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

from services.common.errors import ConfigError
from services.common.ids import ReqId

#: The request that the current task works for; every log line of the task carries it.
req_id_context: ContextVar[ReqId | None] = ContextVar("req_id", default=None)

LEVELS = ("debug", "info", "warning", "error")

# What logging itself puts on a record; everything else came through `extra=`.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logging(service: str, level: str) -> None:
    """Replaces the root logger's handlers. `level` is one of LEVELS, in any case."""
    if level.lower() not in LEVELS:
        choices = ", ".join(LEVELS)
        raise ConfigError(f"INFINITE_LLM_LOG_LEVEL must be one of {choices}, not {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _is_req_id(key: str, value: object) -> bool:
    """Request ids are written as clients see them: in hexadecimal."""
    return key.endswith("req_id") and isinstance(value, int)


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        req_id = req_id_context.get()
        if req_id is not None:
            line["req_id"] = req_id
        line.update(
            (key, value) for key, value in vars(record).items() if key not in _STANDARD_FIELDS
        )
        for key in [key for key, value in line.items() if _is_req_id(key, value)]:
            line[key] = f"{line[key]:x}"
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
