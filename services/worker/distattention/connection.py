"""The creditor's end of one connection: answers attention, takes block copies and gives them back.

Run by `creditor.CreditorServer`, one thread each, beside the instance's own step. Any error is told
to the owner and ends the connection.
"""

import logging

from services.common.errors import PartLost
from services.worker.distattention.priority import run_at_once
from services.worker.distattention.session import Serving, Session
from services.worker.distattention.transport.interface import NotTrusted, Stream
from services.worker.distattention.wire import (
    MAX_ERROR_TEXT_BYTES,
    ErrorCode,
    Head,
    Hello,
    Kind,
    WireError,
)

#: The most rows of one query. A bound on what a connection may allocate, far above any batch.
MAX_ROWS = 1 << 16
_MAX_DRAIN_BYTES = 1 << 28

_log = logging.getLogger(__name__)


class Connection:
    def __init__(self, serving: Serving, stream: Stream) -> None:
        self._serving = serving
        self._stream = stream

    def run(self) -> None:
        """Serves until the peer hangs up, an error, or `shutdown`."""
        try:
            self._serve()
        except NotTrusted as error:
            self._serving.metrics.record_failure()
            _log.warning("refused the data plane's peer: %s", error)
        except OSError as error:
            _log.debug("connection ended: %s", error)
        except WireError as error:
            self._refuse(error.error, error.message)
        except PartLost as error:
            text = str(error).removeprefix(f"instance {error.inst_id}: ")
            self._refuse(ErrorCode.PART_LOST, text)
        except Exception:
            _log.exception("connection failed")
            self._refuse(ErrorCode.INTERNAL, "the creditor failed; its log says why")
        finally:
            self._stream.close()

    def shutdown(self) -> None:
        """Makes `run` return soon; called by another thread."""
        self._stream.shutdown()

    def _serve(self) -> None:
        hello = self._greet()
        if hello.max_rows:  # block copies can wait
            run_at_once()
        session = Session(self._serving, self._stream, hello)
        self._stream.send(Head(Kind.WELCOME))
        came: Head | None = None
        while True:
            head = came or self._stream.receive_head(may_idle=True)
            came = None
            if head.kind is Kind.QUERY:
                session.answer(head)
                came = session.answer_on(head.item + 1)
            elif head.kind is Kind.PLAN:
                session.plan(head)
                came = session.answer_on(0)
            elif head.kind is Kind.COPY:
                session.take_block(head)
            elif head.kind is Kind.FETCH:
                session.give_block(head)
            elif head.kind is Kind.PING:
                self._stream.receive_bytes(head.payload_bytes)
                self._stream.send(Head(Kind.PONG))
            else:
                raise WireError(ErrorCode.BAD_MESSAGE, f"{head.kind.name} is not for a creditor")

    def _greet(self) -> Hello:
        head = self._stream.receive_head()
        if head.kind is not Kind.HELLO:
            raise WireError(ErrorCode.BAD_MESSAGE, f"{head.kind.name} before HELLO")
        hello = Hello.unpack(self._stream.receive_bytes(head.payload_bytes))
        me = self._serving.me
        for what, theirs, ours in (
            ("instance", hello.creditor_inst_id, me.inst_id),
            ("incarnation", hello.creditor_incarnation, me.incarnation),
            ("geometry", hello.geometry, self._serving.geometry),
        ):
            if theirs != ours:
                raise WireError(ErrorCode.MISMATCH, f"{what} is {ours}, not {theirs}")
        if hello.max_rows > MAX_ROWS:
            text = f"takes {MAX_ROWS} rows at once, not {hello.max_rows}"
            raise WireError(ErrorCode.MISMATCH, text)
        return hello

    def _refuse(self, error: ErrorCode, text: str) -> None:
        _log.warning("refused the data plane's peer: %s: %s", error.name, text)
        self._serving.metrics.record_failure()
        try:
            self._stream.send(Head(Kind.ERROR, error), text.encode()[:MAX_ERROR_TEXT_BYTES])
        except OSError:
            return
        self._stream.drain(_MAX_DRAIN_BYTES)
