"""Runs a page of the documentation as a reader would: top to bottom, in one empty folder.

TOML and Python blocks that the text says to save (``Save this as `sweep.toml`:``) are saved; other Python
blocks run in one session, as in a notebook; lines of console blocks that begin with `$` run in a shell."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.package import outside

SECONDS = 300  # for one command or block
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.M | re.S)
_SAVED = re.compile(r"[Ss]ave\b[^`]*`([\w./-]+\.\w+)`[^`]*:\s*\Z")
_SESSION = """
import contextlib, json, sys, traceback
asked, answers = sys.stdin, sys.stdout
names = {"__name__": "__main__"}
for line in asked:
    with contextlib.redirect_stdout(sys.stderr):
        try:
            exec(compile(json.loads(line), "block", "exec"), names)
            failed = ""
        except BaseException:
            failed = traceback.format_exc()
    print(json.dumps(failed), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Step:
    """One thing that a page asks its reader to do."""

    kind: str  # save, python or command
    text: str
    file: str = ""


def steps(page: str) -> Iterator[Step]:
    """What a page asks for, in its order."""
    end = 0
    for block in _BLOCK.finditer(page):
        language, text = block[1], block[2]
        saved = _SAVED.search(page[end : block.start()])
        end = block.end()
        if saved is not None:
            yield Step("save", text, saved[1])
        elif language == "python":
            yield Step("python", text)
        elif language == "console":
            yield from (Step("command", command) for command in _commands(text))


def _commands(text: str) -> list[str]:
    """The commands of a console block; what they print is left out."""
    joined = re.sub(r"\\\n", " ", text)
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


class Reader:
    """A reader in a folder, with the commands of an environment."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        path = f"{python.parent}:/usr/local/bin:/usr/bin:/bin"
        self.variables = outside(
            PATH=path,
            HOLDFAST_CACHE=str(folder / ".cache"),
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS="1",
            MPLBACKEND="agg",
        )
        self._session: subprocess.Popen[str] | None = None
        self._python = python

    def follow(self, page: str, skipped: Mapping[str, str]) -> list[str]:
        """Do everything that a page asks for, but the commands in `skipped` (beginnings of commands, with the
        reason). Returns the commands that ran."""
        ran: list[str] = []
        try:
            for step in steps(page):
                if step.kind == "save":
                    (self.folder / step.file).write_text(step.text)
                elif step.kind == "python":
                    self._execute(step.text)
                elif not any(step.text.startswith(beginning) for beginning in skipped):
                    self._command(step.text)
                    ran.append(step.text)
        finally:
            if self._session is not None:
                self._session.kill()
                self._session.wait()
        return ran

    def _command(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.variables,
            text=True,
            capture_output=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-3000:]}"

    def _execute(self, block: str) -> None:
        if self._session is None:
            self._session = subprocess.Popen(
                [self._python, "-c", _SESSION],
                cwd=self.folder,
                env=self.variables,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._session.stdin is not None and self._session.stdout is not None
        self._session.stdin.write(json.dumps(block) + "\n")
        self._session.stdin.flush()
        failed = json.loads(self._session.stdout.readline())
        assert not failed, f"{block}\n{failed}"
