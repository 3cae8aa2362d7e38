"""benchmarks/convolution_kernel.py: the references it compares with, and the kernels on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.stacked_convolution.layer import Shape

from benchmarks.stacked_convolution.checks import by_taps, by_torch, numbers, spread, winners

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
CHECK = """
from stacked_convolution.checks import right, shares
from stacked_convolution.layer import Blocks, Choice, Shape
shape = Shape(1, 2, 6, 3, 3, 1, pooled=True)
for mode, turned in (("float64", False), ("tf32", True), ("bf16", False)):
    blocks = Blocks(16, 16, 16, turned=turned, splits=2)
    found = shares(Choice(shape, {kind: blocks for kind in shape.kinds}, mode, True), "cpu", clients=2)
    assert len(found) == 4 and right(found), found
"""


@pytest.mark.parametrize("shape", [Shape(2, 3, 6, 4, 3, 1), Shape(2, 2, 8, 5, 5)], ids=["3+1", "5+0"])
def test_the_slow_reference_is_torchs_convolution_of_each_client(shape: Shape) -> None:
    given = numbers(shape, 3, torch.float64, "cpu")
    for got, want in zip(by_taps(*given, shape.padding), by_torch(*given, shape.padding), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_gradients_before_pooling_go_to_the_winners() -> None:
    images = torch.randn(2, 3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images[0, 0, :2, :2] = -1.0  # nothing in this window is above zero
    images.requires_grad_()
    pooled = F.max_pool2d(F.relu(images), 2)
    g = torch.arange(1.0, pooled.numel() + 1, dtype=torch.float64).view_as(pooled)
    (want,) = torch.autograd.grad(pooled, images, g)
    assert torch.equal(spread(g, winners(images.detach())), want)
    assert int(winners(images.detach())[0, 0, 0, 0]) == 4


@NEEDS_TRITON
def test_the_kernels_equal_torchs_convolution_in_tritons_interpreter() -> None:
    places = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    surroundings = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    subprocess.run([sys.executable, "-c", CHECK], env=surroundings, check=True)


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton_the_script_says_what_is_missing() -> None:
    script = ROOT / "benchmarks" / "convolution_kernel.py"
    said = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert said.returncode == 1 and said.stderr.startswith("Triton is not installed: pip install triton")
    assert said.stderr.count("\n") == 1
