"""Events and spans of a sample, kept in the sample: what an episode spent its time on.

Input: a `Sample` (or several, or the handle of one in another process). Events are plain dicts in the sample's `trace`
attribute, `{"trace_id", "attempt", "events": [...]}`, so they survive `to_dict`, pickling and dumps.
Each event has `type` (`event`, `span_start`, `span_end`), `name`, `ts` (seconds since the epoch), `attempt`, `attrs`, and for
spans `span_id` and `parent_span_id`.
Invariants: tracing never changes a sample's training fields; a span that is opened is closed, also when its block raises;
spans nest by the calling context, also across tasks. Left out: drawing.
"""

from __future__ import annotations

import functools
import inspect
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime.utils.types import Sample

F = TypeVar("F", bound=Callable[..., Any])

_META_KEYS = (
    *("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "queue_time", "weight_version", "id"),
    *("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"),
)
# trace id -> innermost open span, for the running context.
_open_spans: ContextVar[dict[str, str] | None] = ContextVar("slime_open_spans", default=None)


@dataclass
class TraceHandle:
    """Where the events of one sample go; `carrier` is the dict that the sample keeps."""

    trace_id: str
    carrier: dict[str, Any]
    sample_id: int | str | None = None
    group_id: int | str | None = None
    attempt: int = 0
    parent_span_id: str | None = None


Target = Sample | TraceHandle | list[Sample | TraceHandle]


@dataclass
class TraceSpanContext:
    """An open span; what is `set` on it is written when it closes."""

    target: Any
    handles: list[TraceHandle]
    span_records: list[tuple[TraceHandle, str]] = field(default_factory=list)
    start_ts: float = 0.0
    end_attrs: dict[str, Any] = field(default_factory=dict)
    end_events: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False

    def set(self, key: str, value: Any) -> TraceSpanContext:
        """Adds one attribute; also after the span closed."""
        return self.update({key: value})

    def update(self, attrs: dict[str, Any] | None) -> TraceSpanContext:
        """Adds attributes; also after the span closed."""
        self.end_attrs.update(attrs or {})
        for event in self.end_events:
            event["attrs"] = self.build_end_attrs()
        return self

    def set_attr(self, key: str, value: Any) -> TraceSpanContext:
        """Same as `set`."""
        return self.set(key, value)

    def update_attrs(self, attrs: dict[str, Any] | None) -> TraceSpanContext:
        """Same as `update`."""
        return self.update(attrs)

    def build_end_attrs(self) -> dict[str, Any] | None:
        """A copy of what was set, None when nothing was."""
        return dict(self.end_attrs) or None

    def finalize(self, end_events: list[dict[str, Any]]) -> None:
        """The span is closed; `end_events` are its written ends."""
        self.end_events, self.closed = end_events, True


def build_sglang_meta_trace_attrs(meta: dict[str, Any]) -> dict[str, Any]:
    """The parts of an engine's `meta_info` that belong in a trace: token counts, times, version, finish reason."""
    attrs = {key: meta[key] for key in _META_KEYS if meta.get(key) is not None}
    finish = meta.get("finish_reason")
    if finish is not None:
        attrs["finish_reason"] = finish.get("type") if isinstance(finish, dict) else finish
    return attrs


def bind_trace(sample: Sample) -> TraceHandle:
    """The handle of a sample, whose `trace` is made when it has none."""
    holder: Any = sample
    carrier = getattr(sample, "trace", None)
    handle = bind_trace_carrier(carrier, sample_id=sample.index, group_id=sample.group_index)
    holder.trace = handle.carrier
    return handle


def bind_trace_carrier(
    carrier: dict[str, Any] | None,
    *,
    trace_id: str | None = None,
    sample_id: int | str | None = None,
    group_id: int | str | None = None,
    attempt: int = 0,
    parent_span_id: str | None = None,
) -> TraceHandle:
    """A handle that writes into `carrier` (a new one for None); what the carrier already says wins over `trace_id`."""
    carrier = {} if carrier is None else carrier
    carrier.setdefault("trace_id", trace_id or uuid.uuid4().hex)
    carrier.setdefault("attempt", attempt)
    carrier.setdefault("events", [])
    return TraceHandle(carrier["trace_id"], carrier, sample_id, group_id, carrier["attempt"], parent_span_id)


def export_trace(handle: TraceHandle) -> dict[str, Any]:
    """Plain form for another process, without the events: `import_trace` there makes a handle of the same trace."""
    return {
        "trace_id": handle.trace_id,
        "sample_id": handle.sample_id,
        "group_id": handle.group_id,
        "attempt": handle.attempt,
        "parent_span_id": _parent_of(handle),
    }


def import_trace(payload: dict[str, Any], carrier: dict[str, Any] | None = None) -> TraceHandle:
    """The handle of an exported trace; its events go to `carrier`."""
    known = ("trace_id", "sample_id", "group_id", "attempt", "parent_span_id")
    return bind_trace_carrier(carrier, **{key: payload[key] for key in known if key in payload})


def trace_event(target: Target, name: str, *, attrs: dict[str, Any] | None = None) -> None:
    """Writes one event at this moment."""
    now = time.time()
    for handle in _handles(target):
        _write(handle, "event", name, now, attrs, _parent_of(handle))


@contextmanager
def trace_span(
    target: Target, name: str, *, attrs: dict[str, Any] | None = None, record_error: bool = True
) -> Iterator[TraceSpanContext]:
    """A span around the block. With `record_error` an exception's type and text are attributes of its end."""
    context = TraceSpanContext(target, _handles(target), start_ts=time.time())
    inner = dict(_open_spans.get() or {})
    for handle in context.handles:
        span_id = uuid.uuid4().hex[:16]
        context.span_records.append((handle, span_id))
        _write(handle, "span_start", name, context.start_ts, attrs, _parent_of(handle), span_id)
        inner[handle.trace_id] = span_id
    token = _open_spans.set(inner)
    try:
        yield context
    except BaseException as error:
        if record_error:
            context.update({"error": type(error).__name__, "error_message": str(error)})
        raise
    finally:
        _open_spans.reset(token)
        now, ends = time.time(), context.build_end_attrs()
        context.finalize(
            [_write(handle, "span_end", name, now, ends, None, span_id) for handle, span_id in context.span_records]
        )


def trace_next_attempt(target: Target, *, attrs: dict[str, Any] | None = None) -> None:
    """The episode starts over: later events carry the next attempt number."""
    for handle in _handles(target):
        handle.carrier["attempt"] += 1
        handle.attempt = handle.carrier["attempt"]
        _write(handle, "event", "next_attempt", time.time(), attrs, None)


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., dict[str, Any] | None] | None = None,
    record_error: bool = True,
) -> Callable[[F], F]:
    """Decorator: a span around every call of a function or coroutine function.

    `target` names the parameter that holds the sample; `target_getter` and `attrs_getter` are called with the arguments.
    A call without a target (None) is not traced. Raises ValueError unless exactly one way to the target is given.
    """
    if (target is None) == (target_getter is None):
        raise ValueError("trace_function needs either target or target_getter")

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        def find(args: Any, kwargs: Any) -> Any:
            if target_getter is not None:
                return target_getter(*args, **kwargs)
            return signature.bind(*args, **kwargs).arguments.get(str(target))

        @contextmanager
        def span(args: Any, kwargs: Any) -> Iterator[None]:
            found = find(args, kwargs)
            if found is None:
                yield
                return
            attrs = attrs_getter(*args, **kwargs) if attrs_getter is not None else None
            with trace_span(found, name, attrs=attrs, record_error=record_error):
                yield

        return _wrapped(function, span)

    return decorate


def _wrapped(function: Any, span: Callable[..., Any]) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            with span(args, kwargs):
                return await function(*args, **kwargs)

        return asynchronous

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        with span(args, kwargs):
            return function(*args, **kwargs)

    return synchronous


def _handles(target: Any) -> list[TraceHandle]:
    if isinstance(target, (list, tuple)):
        return [handle for item in target for handle in _handles(item)]
    return [target if isinstance(target, TraceHandle) else bind_trace(target)]


def _parent_of(handle: TraceHandle) -> str | None:
    return (_open_spans.get() or {}).get(handle.trace_id, handle.parent_span_id)


def _write(
    handle: TraceHandle,
    kind: str,
    name: str,
    ts: float,
    attrs: dict[str, Any] | None,
    parent_span_id: str | None,
    span_id: str | None = None,
) -> dict[str, Any]:
    event: dict[str, Any] = {"type": kind, "name": name, "ts": ts, "attempt": handle.carrier["attempt"]}
    event |= {"sample_id": handle.sample_id, "group_id": handle.group_id, "attrs": dict(attrs or {}) or None}
    if span_id is not None:
        event["span_id"] = span_id
    if parent_span_id is not None:
        event["parent_span_id"] = parent_span_id
    handle.carrier["events"].append(event)
    return event
