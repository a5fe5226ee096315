"""The trace that a call belongs to: handed on to who is called, and taken over from who calls.

Used by `rpc` for every call, and by the router for HTTP.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
#: Finds the provider that is configured later; to look for it at each call would cost 9 us.
_tracer = trace.get_tracer(__name__)


def current_trace() -> dict[str, str]:
    """As headers; none outside of a trace."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers)
    return headers


@contextmanager
def span_of_call(name: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
    """Of a call that is served here, and current meanwhile; in the caller's trace, if it has one.

    In two steps, since `start_as_current_span` drops the caller's trace where none is kept here.
    """
    parent = _PROPAGATOR.extract(headers)
    span = _tracer.start_span(name, context=parent, kind=trace.SpanKind.SERVER)
    with trace.use_span(span, end_on_exit=True):
        yield span
