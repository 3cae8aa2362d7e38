"""The command line. `main` is the command `holdfast`; each other module here holds one command or a few of a
kind.

Nothing here imports torch: a command does so when it needs it, so that --help and usage errors are
immediate."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from holdfast.cli import (
    bench,
    compare,
    customise,
    data,
    demo,
    diagnose,
    federation,
    federation_clients,
    parts,
    plan,
    reproduce,
    runs,
    sweeps,
    tune,
)
from holdfast.cli.app import app, complain
from holdfast.core.errors import HoldfastError, RunError

__all__ = [
    "app",
    "bench",
    "compare",
    "customise",
    "data",
    "demo",
    "diagnose",
    "federation",
    "federation_clients",
    "main",
    "parts",
    "plan",
    "reproduce",
    "runs",
    "sweeps",
    "tune",
]


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and leave with its exit code: 0 well, 2 the user can mend it, 3 a single run diverged,
    130 interrupted, 1 a fault of ours or a cell of a sweep that failed."""
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    for name in ("COLUMNS", "LINES"):  # Rich reads any digit of Unicode as a number, and then stumbles
        if not os.environ.get(name, "").isascii():
            del os.environ[name]
    try:
        answer = app(args=None if args is None else list(args), prog_name="holdfast", standalone_mode=False)
        return answer if isinstance(answer, int) else 0
    except HoldfastError as error:
        if os.environ.get("HOLDFAST_DEBUG") or _in_a_plugin(error):
            traceback.print_exc()
        return complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted")
        return 130
    except BrokenPipeError:  # `holdfast list | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return complain(
                f"the disk is full{f': could not write {error.filename}' if error.filename else ''}; free"
                " some space"
            )
        return _fault(error)
    except Exception as error:
        # Click's own errors, by what they can do: newer Typers carry a Click of their own under another name.
        usage = getattr(error, "format_message", None)
        return _fault(error) if usage is None else _misused(usage(), getattr(error, "ctx", None))


def _misused(message: str, context: Any) -> int:
    """A wrong option or command; no command at all is answered by Click with the whole help."""
    if "\n" in message.strip() or not message.strip():
        print(message, file=sys.stderr)
        return 2
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    return complain(message.strip().rstrip(".") + hint)


def _fault(error: Exception) -> int:
    """Not foreseen: a mistake in a plug-in, which its author can mend with the traceback, or one of ours."""
    traceback.print_exc()
    if place := _place(error):
        return complain(f"{place}: {type(error).__name__}: {error} (the lines above say how it came there)")
    complain(
        "holdfast failed in a way it should not; please report the lines above, with the command and the"
        " config"
    )
    return 1


def _in_a_plugin(error: HoldfastError) -> bool:
    """Whether it only passes on what somebody's code raised, here or in a worker process, which is noted
    then."""
    passed_on = error.__cause__ is not None or bool(getattr(error, "__notes__", None))
    return isinstance(error, RunError) and passed_on and _place(error) is not None


def _place(error: Exception) -> object:
    from holdfast.core.error_origin import place_of

    return place_of(error)
