"""Driving generators that yield requests, are sent replies and return a result.

A server half is such a generator of exchanges, and so are the loop of a run and every step between them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

Steps = Generator[Any, Any, Any]


@dataclass(frozen=True)
class Finished:
    """The end of a generator, with what it returned."""

    value: Any


def advance(steps: Steps, reply: Any = None) -> Any:
    """Send a reply (None starts the generator). Returns its next request, or `Finished`."""
    try:
        return steps.send(reply)
    except StopIteration as end:
        return Finished(end.value)


def pass_on(request: Any) -> Steps:
    """Yield a request as it is."""
    return (yield request)


def relay(
    steps: Steps,
    ask: Callable[[Any], Steps] = pass_on,
    during: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Steps:
    """Run a generator to its end inside another one. `ask` passes each request on and returns the reply to
    it; whenever `steps` itself runs, it does so within `during()`."""
    reply = None
    while True:
        with during():
            request = advance(steps, reply)
        if isinstance(request, Finished):
            return request.value
        reply = yield from ask(request)


def run_to_end(steps: Steps, answer: Callable[[Any], Any]) -> Any:
    """Answer all requests of a generator. Returns what it returns."""
    request = advance(steps)
    while not isinstance(request, Finished):
        request = advance(steps, answer(request))
    return request.value
