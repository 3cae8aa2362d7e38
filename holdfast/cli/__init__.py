"""The command line. `main` is the command `holdfast`; each other module holds one command or a few related
ones.

No module imports torch at the top: a command imports it when it needs it, so --help and usage errors are
immediate."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from holdfast.cli import (
    bench,
    certify,
    compare,
    customise,
    data,
    demo,
    diagnose,
    federation,
    federation_clients,
    federation_inspect,
    federation_server,
    federation_watch,
    parts,
    plan,
    report,
    reproduce,
    runs,
    sweeps,
    tune,
)
from holdfast.cli.app import app, complain, let_ray_stand_alone, reflow_help, restore_argument_help
from holdfast.core.errors import HoldfastError, RunError

__all__ = [
    "app",
    "bench",
    "certify",
    "compare",
    "customise",
    "data",
    "demo",
    "diagnose",
    "federation",
    "federation_clients",
    "federation_inspect",
    "federation_server",
    "federation_watch",
    "main",
    "parts",
    "plan",
    "report",
    "reproduce",
    "runs",
    "sweeps",
    "tune",
]

_PANELS = {
    "Run experiments": ("demo", "run", "sweep", "resume", "plan", "tune", "reproduce", "federation"),
    "Look at results": ("report", "compare", "diagnose", "certify", "customise"),
    "Look things up": ("list", "show", "data", "bench"),
}
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


def _arrange_help() -> None:
    """Sort the commands into the panels of `holdfast --help`."""
    order = [name for names in _PANELS.values() for name in names]
    panel_of = {name: panel for panel, names in _PANELS.items() for name in names}

    def name_of(command: Any) -> str:
        return command.name or getattr(command.callback, "__name__", "") or command.typer_instance.info.name

    app.registered_commands.sort(key=lambda command: order.index(name_of(command)))
    listed: list[Any] = [*app.registered_commands, *app.registered_groups]
    for command in listed:
        command.rich_help_panel = panel_of[name_of(command)]
    reflow_help(app)


_arrange_help()


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit. Exit codes: 0 success, 1 internal error or failed cell of a sweep, 2 error
    that the user can fix, 3 a single run diverged, 130 interrupted."""
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    for name in ("COLUMNS", "LINES"):  # Rich fails on digits that are not ASCII
        if not os.environ.get(name, "").isascii():
            del os.environ[name]
    try:
        command = typer.main.get_command(app)
        restore_argument_help(command)
        let_ray_stand_alone(command)
        answer = command(
            args=None if args is None else list(args), prog_name="holdfast", standalone_mode=False
        )
        return answer if isinstance(answer, int) else 0
    except HoldfastError as error:
        if _said_by_the_first(error):
            return 2
        if os.environ.get("HOLDFAST_DEBUG") or _in_a_plugin(error):
            traceback.print_exc()
        return complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted")
        return 130
    except BrokenPipeError:  # `holdfast list | head`: the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return complain(
                f"the disk is full{f': cannot write {error.filename}' if error.filename else ''}; free"
                " some space"
            )
        return _internal_error(error)
    except Exception as error:
        # Click's own errors are recognised by their method: newer versions of Typer bundle Click under
        # another name.
        usage = getattr(error, "format_message", None)
        return _internal_error(error) if usage is None else _usage_error(usage(), getattr(error, "ctx", None))


def _said_by_the_first(error: HoldfastError) -> bool:
    """Whether this is one of several processes that run an experiment together, and the first of them
    reports the same error."""
    if "RANK" not in os.environ:
        return False
    from holdfast.engine.ranks import RankLost, follows

    own = isinstance(error, RunError) and not isinstance(error, RankLost)
    return follows() and (not own or str(error).startswith("rank "))


def _usage_error(message: str, context: Any) -> int:
    """Report a wrong option or command. Without any command, Click's message is the whole help."""
    if "\n" in message.strip() or not message.strip():
        print(message, file=sys.stderr)
        return 2
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    return complain(message.strip().rstrip(".") + hint)


def _internal_error(error: Exception) -> int:
    """Report an unexpected exception: a mistake in a plug-in, which its author can fix with the traceback, or
    one of Holdfast's own."""
    traceback.print_exc()
    what = f"{type(error).__name__}: {error}"
    if place := _place(error):
        return complain(f"{place}: {what} (see the traceback above)")
    complain(
        f"internal error in {_innermost_file(error)}: {what} (please report the traceback above, with the"
        " command and the config)"
    )
    return 1


def _innermost_file(error: Exception) -> str:
    """Return the innermost line of Holdfast on the exception's way: 'holdfast/sweeps/session.py, line 40'."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
    return (
        f"holdfast/{frames[-1].filename[len(_PACKAGE) :]}, line {frames[-1].lineno}" if frames else "holdfast"
    )


def _in_a_plugin(error: HoldfastError) -> bool:
    """Whether the error only passes on an exception of a plug-in, in this process or in a worker process
    (which leaves a note)."""
    passed_on = error.__cause__ is not None or bool(getattr(error, "__notes__", None))
    return isinstance(error, RunError) and passed_on and _place(error) is not None


def _place(error: Exception) -> object:
    from holdfast.core.error_origin import place_of

    return place_of(error)
