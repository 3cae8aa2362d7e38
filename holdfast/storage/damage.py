"""Errors that come from damaged runs: files that can be read, but whose tensors have other names, types or
shapes than the code that uses them expects. No check can know what each method keeps, so the error is caught
where the tensors are used, and names the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.error_origin import place_of
from holdfast.core.errors import RunError, in_print

_CAUSED = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
)


@contextmanager
def using_committed(path: Path, round: int) -> Iterator[None]:
    """Report errors of Holdfast's own code that uses committed tensors as one line. Errors of plug-ins pass
    unchanged: their author needs them."""
    try:
        yield
    except _CAUSED as error:
        damaged = damage(path, round, error)
        if damaged is None:
            raise
        raise damaged from error


def damage(path: Path, round: int, error: BaseException) -> RunError | None:
    """The one line for an error that only damage explains; None for any other."""
    if not isinstance(error, _CAUSED) or place_of(error) is not None:
        return None
    why = f"{type(error).__name__}: {in_print(str(error))[:200]}"
    return RunError(
        f"{path}: what was committed in round {round} cannot be used ({why}); it may be damaged, or of"
        " another version"
    )
