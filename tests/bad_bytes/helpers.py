"""What the tests of damaged and hostile input share: values to put in, places to put them, and what every
reader owes: one line that says what is wrong, within a time and within a bound of memory. docs/bad-bytes.md
lists the readers."""

from __future__ import annotations

import contextlib
import copy
import signal
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000

LONG = pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.slow)])
"""For properties: few examples always, many in the slow suite."""


def budget(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


def one_line(error: Exception, *said: str) -> None:
    assert str(error).isprintable() and len(str(error)) < 1000, str(error)[:3000]
    assert all(word in str(error) for word in said), str(error)


@contextlib.contextmanager
def limited(seconds: int = 20, mebibytes: int | None = None) -> Iterator[None]:
    """Fails where reading goes on beyond a time, or where Python and NumPy ask for more memory than this at
    once."""

    def too_long(*_: Any) -> None:
        raise AssertionError(f"it was not read within {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    if mebibytes is not None:
        tracemalloc.start()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if mebibytes is not None:
        assert peak < mebibytes << 20, f"{peak:,} bytes were asked for"


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 3, 10**9, 10**30, 10**299, 1e308, -1e308, 0.5, 2.0]),
    st.text(max_size=4),
    st.sampled_from(
        [[], {}, [[]], {"a": {}}, [None], {"1": 2}, "state/000001.safetensors", "\ud800", "a\0b", "9" * 40]
    ),
)


def places(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is a value, at any depth."""
    yield before
    inner = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in inner:
        yield from places(value, (*before, key))


@st.composite
def broken(draw: st.DrawFn, content: Any) -> Any:
    """The same with one value replaced or taken out."""
    place = draw(st.sampled_from(list(places(content))[1:]))
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if isinstance(inner, dict) and draw(st.integers(0, 3)) == 0:
        del inner[place[-1]]
    else:
        inner[place[-1]] = draw(JUNK)
    return content


@st.composite
def altered(draw: st.DrawFn, content: bytes) -> bytes:
    """The same with a few bytes changed, taken out or put in, or cut short."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(changed) - 1, 0)))
        changed[at : at + draw(st.integers(0, 3))] = draw(
            st.binary(max_size=3) | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"9" * 20])
        )
    return bytes(changed[: draw(st.none() | st.integers(0, len(changed)))])
