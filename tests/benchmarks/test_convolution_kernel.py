"""benchmarks/convolution_kernel.py: the references it compares with, and the kernels on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.stacked_convolution.checks import by_taps, by_torch, numbers
from holdfast.models.stacked_convolution.shape import Shape

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
CHECK = """
import torch
from stacked_convolution.checks import right, shares
from holdfast.models.stacked_convolution.shape import Blocks, Choice, Shape
shape = Shape(1, 2, 6, 3, 3, 1)
for mode, turned in (("float64", False), ("tf32", True), ("bf16", False)):
    blocks = Blocks(16, 16, 16, turned=turned, splits=2)
    found = shares(Choice(shape, {kind: blocks for kind in shape.kinds}, mode), "cpu", clients=2)
    assert len(found) == 4 and right(found), found
"""


@pytest.mark.parametrize("shape", [Shape(2, 3, 6, 4, 3, 1), Shape(2, 2, 8, 5, 5)], ids=["3+1", "5+0"])
def test_the_slow_reference_is_torchs_convolution_of_each_client(shape: Shape) -> None:
    given = numbers(shape, 3, torch.float64, "cpu")
    for got, want in zip(by_taps(*given, shape.padding), by_torch(*given, shape.padding), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@NEEDS_TRITON
@pytest.mark.slow
def test_the_kernels_equal_torchs_convolution_in_tritons_interpreter() -> None:
    places = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), *(path for path in sys.path if path)])
    surroundings = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    subprocess.run([sys.executable, "-c", CHECK], env=surroundings, check=True)


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton_the_script_says_what_is_missing() -> None:
    script = ROOT / "benchmarks" / "convolution_kernel.py"
    said = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert said.returncode == 1 and said.stderr.startswith("Triton is not installed: pip install triton")
    assert said.stderr.count("\n") == 1
