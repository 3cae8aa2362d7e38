"""benchmarks/spans.py and benchmarks/timeline.py: what the picture of a round is made of."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.spans import Recorder, Span, flat, merged, within

ROOT = Path(__file__).parents[2]


def test_the_innermost_span_counts() -> None:
    spans = [Span(1, "a", 0, 10), Span(1, "b", 2, 6), Span(1, "c", 3, 4), Span(1, "a", 12, 13)]
    assert [(s.part, s.start, s.end) for s in flat(spans)] == [
        ("a", 0, 2),
        ("b", 2, 3),
        ("c", 3, 4),
        ("b", 4, 6),
        ("a", 6, 10),
        ("a", 12, 13),
    ]


def test_spans_that_overlap_are_counted_once() -> None:
    union = merged([(5, 6), (0, 2), (1, 3), (3, 4)])
    assert union == [(0, 4), (5, 6)]
    assert within(union, 1, 5.5) == 3.5


def test_work_that_is_shared_out_counts_where_it_was_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("holdfast.of_this_test")

    def each(work: Any, items: list[int]) -> list[int]:
        answers: list[int] = []
        threads = [threading.Thread(target=lambda i=i: answers.append(work(i))) for i in items]
        for thread in threads:
            thread.start()
            thread.join()
        return answers

    module.each = each
    module.outer = lambda: module.each(lambda item: item + 1, [1, 2])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    recorder = Recorder()
    recorder.watch("outer", f"{module.__name__}:outer")
    recorder.watch("gone", f"{module.__name__}:no_such_function")
    recorder.watch_sharing("waits", f"{module.__name__}:each")
    assert module.outer() == [2, 3]
    assert recorder.missing == [f"{module.__name__}:no_such_function"]
    here = threading.get_native_id()
    assert sorted(span.part for span in recorder.spans if span.thread == here) == ["outer", "waits"]
    assert [span.part for span in recorder.spans if span.thread != here] == ["outer", "outer"]


def test_a_trace_of_the_profiler_says_when_a_gpu_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    timeline = importlib.import_module("timeline")

    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7}

    trace = {
        "baseTimeNanoseconds": 1_000_000_000_000,
        "traceEvents": [
            event("kernel", "gemm", 5e6, 1e6),
            event("kernel", "add", 5.5e6, 1e6),
            event("gpu_memcpy", "Memcpy DtoH", 8e6, 2e6),
            event("cuda_runtime", "cudaStreamSynchronize", 5e6, 5e6),
            event("cuda_runtime", "cudaLaunchKernel", 5e6, 5e6),
            event("cpu_op", "aten::add", 5e6, 5e6),
        ],
    }
    assert timeline.device_intervals(trace, offset=1_000_000_000_000) == {
        "GPU computes": [(5.0, 6.5)],
        "GPU copies": [(8.0, 10.0)],
    }
    (wait,) = timeline.waits_of(trace, 1_000_000_000_000)
    assert (wait.thread, wait.part, wait.start, wait.end) == (7, "waits for the GPU", 5.0, 10.0)


@pytest.mark.slow
def test_the_picture_of_two_experiments_is_drawn(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "timeline.py", "--out", tmp_path]
    options = ["--experiments", "2", "--rounds", "3", "--show", "1", "--threads", "2"]
    subprocess.run([*command, *options], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    found = json.loads((tmp_path / "timeline.json").read_text())
    assert found["not_found"] == []
    assert 0 < found["device_works"] < 1
    parts = {part for spent in found["seconds_of_a_round"].values() for part in spent}
    assert {"servers", "attacks", "training", "stacks put together", "round written down"} <= parts
    assert (tmp_path / "timeline.png").stat().st_size > 10_000 < (tmp_path / "timeline.svg").stat().st_size
