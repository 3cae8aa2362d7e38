"""The script that measures whole rounds on a GPU, here with commands that need none."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_session
from benchmarks.gpu_session import HERE, PARTS, Part, main, round_seconds


def python(code: str, limit: float) -> Part:
    return Part("a test", (sys.executable, "-c", code, "OUT"), limit)


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        "long": python("print('begun', flush=True); import time; time.sleep(60)", 2.0),
        "wrong": python("raise SystemExit(3)", 30.0),
        "good": python("import sys; open(sys.argv[1] + '/made', 'w')", 30.0),
    }
    monkeypatch.setattr(gpu_session, "PARTS", parts)
    main(["--out", str(tmp_path), "--parts", *parts])
    found = json.loads((tmp_path / "session.json").read_text())
    assert [found[name]["exit"] for name in parts] == [-1, 3, 0]
    assert (tmp_path / "long.log").read_text() == "begun\n\nstopped after 2 s\n"
    assert (tmp_path / "good" / "made").exists()


def test_seconds_of_rounds_are_those_between_their_files(tmp_path: Path) -> None:
    for cell, times in {"a": (10.0, 12.0, 15.5), "b": (10.0, 11.0)}.items():
        folder = tmp_path / cell / "parts"
        folder.mkdir(parents=True)
        for number, moment in enumerate(times):
            file = folder / f"{number:06d}.json"
            file.write_text("{}")
            os.utime(file, (moment, moment))
    assert round_seconds(tmp_path) == [2.0, 3.5]


def test_every_script_that_is_named_exists() -> None:
    scripts = [part.command[1] for part in PARTS.values() if part.command[1] != "-c"]
    assert scripts and all(Path(name).parent == HERE and Path(name).exists() for name in scripts)
