"""Compiled code is found again by the operations of a step, in a folder that is the user's own; code that is
damaged is made again; and processes that compile ahead are waited for, or done without."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from holdfast.local import compile_ahead as ahead
from holdfast.local import compiled_code, programs
from holdfast.local.compiled_code import VARIABLE, Operations, Traced, compiled
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.models.network import Network
from tests.helpers import deal, random_samples, starts, train

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch is asked for its folder anew, and the environment is as it was in the end."""
    monkeypatch.setenv(VARIABLE, "x")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(compiled_code, "_ours", None)
    programs.forget()
    programs._refused.clear()
    yield
    programs.forget()
    programs._traced.clear()


def step_of(factor: float, rows: int = 3) -> Traced:
    """A small step with tables of tensors, and one that it holds itself."""
    held = torch.arange(4.0)

    def step(memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": memory["a"] * factor + held, "other": memory["b"].sin()}

    inputs = {"a": torch.ones(rows, 4), "b": torch.ones(2)}
    return Traced.of(make_fx(lambda *given: step(*given), None, "fake", _allow_non_fake_inputs=True)(inputs))


def test_a_step_is_known_by_its_operations_and_shapes() -> None:
    first, again = step_of(2.0), step_of(2.0)
    assert first.operations and again.operations and step_of(3.0).operations
    assert first.operations.digest == again.operations.digest
    assert len({step_of(f, r).operations.digest for f, r in ((2.0, 3), (3.0, 3), (2.0, 4))}) == 3  # type: ignore[union-attr]
    assert [tensor.tolist() for tensor in first.constants] == [[0, 1, 2, 3]]
    assert len(first.operations.inputs) == 3
    assert len(pickle.dumps(first.operations)) < 10_000, "no tensor is sent"


def test_operations_alone_compute_what_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operations, "compiled", lambda self: pickle.loads(self.packed))  # without a compiler
    run = compiled(step_of(2.0), CPU, "fp32")
    out = run({"a": torch.ones(3, 4), "b": torch.zeros(2)})
    assert out["sum"].tolist() == [[2, 3, 4, 5]] * 3 and out["other"].tolist() == [0, 0]


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "compiled"
    assert compiled_code.use_cache() == folder and os.environ[VARIABLE] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)  # others could put code there
    assert compiled_code.use_cache() is None and VARIABLE not in os.environ
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert compiled_code.use_cache() is None
    monkeypatch.setenv(VARIABLE, "/of/the/user")
    assert compiled_code.use_cache() is None and os.environ[VARIABLE] == "/of/the/user"


def test_several_steps_are_compiled_by_processes_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is left to this process, known ones and equal ones are left out; a process that fails costs
    one line."""
    ran: list[Any] = []

    def run(command: list[str], input: bytes, env: dict[str, str], **_: Any) -> None:
        job = pickle.loads(input)
        ran.append(job[0].digest)
        assert env["TORCHINDUCTOR_COMPILE_THREADS"] and env[VARIABLE] == os.environ[VARIABLE]
        if job[0].digest == fails.operations.digest:  # type: ignore[union-attr]
            raise subprocess.CalledProcessError(1, command, stderr=b"Traceback ...\nOSError: no space\n")

    steps = [step_of(float(factor)) for factor in range(5)]
    first, one, two, fails, known = steps
    assert known.operations
    compiled_code.remember(known.operations, CPU, "fp32")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(Operations, "compiled", lambda self: pickle.loads(self.packed))
    ahead.compile_ahead([(step, CPU, "fp32") for step in [*steps, one]])
    for step in steps:
        compiled(step, CPU, "fp32")
    assert sorted(ran) == sorted(step.operations.digest for step in (one, two, fails) if step.operations)
    assert not compiled_code.being_compiled
    (line,) = [r.message for r in caplog.records if r.name == "holdfast.local" and r.levelname == "WARNING"]
    assert line == "a process that compiles ahead failed (OSError: no space); the step is compiled here"
    ahead.compile_ahead([(step, CPU, "fp32") for step in steps])
    assert len(ran) == 3, "all are known now"


@pytest.mark.parametrize("owner", [torch, compiled_code], ids=["PyTorch", "Holdfast"])
def test_code_of_another_version_is_made_again(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead, by a process, as code that was never made; that of this version is found again afterwards."""
    ran: list[str] = []

    def run(command: list[str], input: bytes, **_: Any) -> None:
        ran.append(pickle.loads(input)[0].digest)

    first, second = steps = [step_of(2.0), step_of(3.0)]
    assert first.operations and second.operations
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(Operations, "compiled", lambda self: pickle.loads(self.packed))

    def start() -> None:
        ahead.compile_ahead([(step, CPU, "fp32") for step in steps])
        for step in steps:
            compiled(step, CPU, "fp32")

    start()
    start()
    assert ran == [second.operations.digest]
    assert not compiled_code.is_known(step_of(4.0).operations, CPU, "fp32"), "other operations"  # type: ignore[arg-type]
    assert not compiled_code.is_known(first.operations, CPU, "bf16")
    with monkeypatch.context() as other:
        other.setattr(owner, "__version__", "0.0.1")
        assert not compiled_code.is_known(first.operations, CPU, "fp32")
        start()
        assert ran == [second.operations.digest] * 2
    start()
    assert len(ran) == 2


def test_code_that_cannot_be_loaded_is_made_again_and_a_model_that_cannot_be_compiled_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = compiled_code.use_cache()
    assert folder is not None
    (folder / "damaged").write_text("")
    samples, network = random_samples(20), Network(lambda: nn.Linear(3, 3), head=None, signature="damaged")
    whole = programs.Program
    able = True

    class Loads(whole):  # type: ignore[valid-type, misc]
        def _make_ready(self) -> None:
            if (Path(os.environ[VARIABLE]) / "damaged").exists() or not able:
                raise EOFError("Ran out of input")
            super()._make_ready()

    monkeypatch.setattr(programs, "Program", Loads)

    def play() -> None:
        train(network, starts(network, 2), samples, deal(samples, [4, 4]), Recipe(), Plan("compiled-vmap"))

    play()
    assert len(programs._programs) == 1 and folder.is_dir() and not (folder / "damaged").exists()
    assert "compiled code of an earlier run was damaged; it is made again" in caplog.text
    able = False
    programs.forget()
    (folder / "kept").write_text("")
    play()
    assert not programs._programs and (folder / "kept").exists()


IN_A_PROCESS = """
import sys, torch
from tests.local.test_compiled_code import CPU, step_of
from holdfast.local import compile_ahead as ahead, programs, compiled_code
from torch._dynamo.utils import counters
from torch._inductor import codecache
if sys.argv[1:]:
    codecache.torch_key = lambda: sys.argv[1].encode()
steps = [step_of(2.0), step_of(3.0)]
ahead.compile_ahead([(step, CPU, "fp32") for step in steps])
waited = len(compiled_code.being_compiled)
def make(step):
    out = compiled_code.compiled(step, CPU, "fp32")({"a": torch.ones(3, 4), "b": torch.zeros(2)})
    assert out["sum"][0].tolist() in ([2, 3, 4, 5], [3, 4, 5, 6]), out
for step in steps:
    try:
        make(step)
    except Exception:
        with compiled_code.compiling_anew():
            make(step)
inductor = counters["inductor"]
print(waited, inductor["fxgraph_cache_miss"], inductor["fxgraph_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.long
def test_code_is_found_by_other_processes_and_made_again_where_it_is_stale_damaged_or_gone(
    tmp_path: Path,
) -> None:
    """With PyTorch's compiler for the CPU, which needs a C++ compiler."""
    env = {**os.environ, "HOLDFAST_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)

    def start(*version: str) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, *version],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [int(word) for word in done.stdout.split()]

    assert start() == [1, 1, 1], "the second step was compiled by a process and found here"
    assert start() == [0, 0, 2], "the next start finds both"
    files = [file for file in (tmp_path / "cache" / "compiled").rglob("*") if file.is_file()]
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    assert start()[1] == 2, "both are made again"
    assert start("another PyTorch")[1:] == [2, 0], "what this one made is of no use to it"
    assert start() == [0, 0, 2], "nor the other way round"
    for folder in (tmp_path / "cache" / "compiled").iterdir():
        if folder.name != "holdfast":
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    assert start() == [0, 2, 0], "the notes say that both are known, but they are gone"
