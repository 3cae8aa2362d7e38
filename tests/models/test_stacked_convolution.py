"""Kernels for convolutions of stacked clients: for which layers and machines they are used, what is traced,
and, where Triton is installed, that its interpreter computes what products do."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx import GraphModule

from benchmarks.activation_bytes import held, peak, program_of
from holdfast.core.device import Precision
from holdfast.local import programs
from holdfast.local.compiled_code import Operations, Traced
from holdfast.local.fit import Recipe
from holdfast.local.plan import bytes_per_row
from holdfast.local.program import Program
from holdfast.local.stack import Stack
from holdfast.models.batched_convolution import as_products, folded
from holdfast.models.network import Network
from holdfast.models.stacked_convolution import use
from holdfast.models.stacked_convolution.blocks import MEASURED, measured, rule
from holdfast.models.stacked_convolution.shape import Blocks, Choice, Shape
from holdfast.models.stacked_convolution.use import KernelFailed, choices_for, choosing, shape_of
from holdfast.models.two_convolutions import two_convolutions
from tests.helpers import random_samples

ROOT = Path(__file__).parents[2]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FIRST, SECOND = Shape(10, 3, 32, 32, 5, samples=True), Shape(10, 32, 14, 64, 5)
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU that fits, and Triton; a test may change either."""
    gpu = SimpleNamespace(name="some GPU", major=9, minor=0, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(use, "find_spec", lambda name: True)
    monkeypatch.setattr(use, "import_module", lambda *names: None)
    use._room.cache_clear()
    yield gpu
    use._room.cache_clear()


def test_kernels_compute_square_convolutions_of_stride_one() -> None:
    x = torch.zeros(4, 6, 9, 9)
    assert shape_of(nn.Conv2d(6, 8, 3, padding=1), x, False) == Shape(4, 6, 9, 8, 3, 1)
    assert shape_of(nn.Conv2d(6, 8, 5, bias=False), x, True) == Shape(4, 6, 9, 8, 5, 0, True)
    others = [
        nn.Conv2d(6, 8, 3, stride=2),
        nn.Conv2d(6, 8, 3, dilation=2),
        nn.Conv2d(6, 8, 3, groups=2),
        nn.Conv2d(6, 8, (3, 5)),
        nn.Conv2d(6, 8, 3, padding=(0, 1)),
        nn.Conv2d(6, 8, 3, padding="same"),
        nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"),
    ]
    assert [shape_of(conv, x, False) for conv in others] == [None] * len(others)
    assert shape_of(nn.Conv2d(6, 8, 3), torch.zeros(4, 6, 9, 8), False) is None


@pytest.mark.parametrize(
    ("precision", "mode"), [("tf32", "tf32"), ("bf16", "bf16"), ("bf16-activations", "bf16")]
)
def test_measured_layers_are_computed_with_the_blocks_of_the_table(
    machine: SimpleNamespace, precision: Precision, mode: str
) -> None:
    choose = choices_for(GPU, precision, torch.float32)
    assert choose is not None
    for shape, entry in ((FIRST, MEASURED[0]), (SECOND, MEASURED[1])):
        choice = choose(shape)
        assert choice is not None and (choice.mode, choice.blocks) == (mode, entry.blocks)
        assert set(choice.blocks) == set(shape.kinds)
    for batch in (10, 64):
        assert choose(SECOND._replace(batch=batch)) is not None
    others = ({"batch": 9}, {"batch": 65}, {"side": 16}, {"samples": True})
    for other in (SECOND._replace(**change) for change in others):
        assert choose(other) is None, "nobody has measured it"
    machine.shared_memory_per_block_optin = 99 << 10
    use._room.cache_clear()
    small = choices_for(GPU, precision, torch.float32)
    assert small is not None and small(FIRST) is not None and small(SECOND) is None


def test_where_kernels_do_not_fit_products_stay_and_the_debug_log_says_why(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast.models")
    assert choices_for(CPU, "tf32", torch.float32) is None
    assert choices_for(GPU, "fp32", torch.float32) is None
    assert choices_for(GPU, "tf32", torch.float64) is None
    assert not caplog.records
    machine.major, machine.minor = 7, 5
    assert choices_for(GPU, "tf32", torch.float32) is None
    use._room.cache_clear()
    monkeypatch.setattr(use, "find_spec", lambda name: None)
    assert choices_for(GPU, "tf32", torch.float32) is None
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "some GPU has compute capability 7.5, kernels need 8.0",
        "Triton is not installed",
    ]


def test_the_rule_gives_every_kernel_of_a_layer_blocks_that_hold_its_channels() -> None:
    assert rule(FIRST) == MEASURED[0].blocks
    assert rule(SECOND) == MEASURED[1].blocks
    found = rule(Shape(10, 6, 14, 100, 5))
    assert [found[kind].channels for kind in ("forward", "weights", "images")] == [64, 64, 16]
    assert measured(Shape(10, 6, 14, 100, 5)) is None


def test_a_choice_survives_as_numbers() -> None:
    for entry in MEASURED:
        choice = Choice(entry.shape, entry.blocks, "bf16")
        layer, blocks = choice.numbers()
        assert {type(number) for number in layer + blocks} == {int}
        assert Choice.of_numbers(layer, blocks, "bf16") == choice


# ---- what is traced


def any_layer(shape: Shape) -> Choice:
    return Choice(shape, dict.fromkeys(shape.kinds, Blocks(16, 16, 16)), "float64")


def small() -> nn.Module:
    return two_convolutions("small", (1, 16, 16), (2, 3), [4], 3)


def program(dtype: torch.dtype = torch.float64) -> tuple[Program, Network]:
    programs.forget()
    network = Network(small, dtype=dtype)
    samples = random_samples(12, (1, 16, 16))
    return program_of(network, samples, Recipe(batch_size=3, lr=0.1), "compiled-vmap", 4), network


def operations_of(traced: GraphModule) -> list[str]:
    names = [str(node.target) for node in traced.graph.nodes]
    return [name.split(".")[1] for name in names if name.startswith("holdfast.")]


def test_a_step_is_traced_with_kernels_without_triton_and_can_be_sent() -> None:
    own, network = program()
    with choosing(any_layer) as made:
        traced = own.traced()
    assert made == [any_layer(Shape(3, 1, 16, 2, 5, 0, True)), any_layer(Shape(3, 2, 6, 3, 5, 0, False))]
    assert sorted(operations_of(traced)) == [
        "convolve", "convolve", "gradient_of_images", "gradient_of_weights", "gradient_of_weights",
    ], "nobody needs the gradient of samples"  # fmt: skip
    alone = Traced.of(traced).operations
    assert alone is not None
    again = pickle.loads(pickle.loads(pickle.dumps(alone)).packed)
    assert operations_of(again) == operations_of(traced)
    assert str(made[1].numbers()[1]) in again.code and str(made[1].numbers()[1]) in alone.text
    planned = 4 * bytes_per_row(network, own.samples.blank(network.dtype), 3)
    assert held(own) + peak(traced) <= planned
    assert peak(traced) < peak(own.traced()), "patches are not kept"


def test_what_is_not_one_stack_of_layers_stays_a_product() -> None:
    plain = nn.Conv2d(2, 3, 3).double()
    conv = folded(nn.Conv2d(2, 3, 3).double())
    conv.load_state_dict(plain.state_dict())
    x = torch.randn(4, 5, 2, 6, 6, dtype=torch.float64)

    def slope(net: nn.Module, own: Tensor) -> Tensor:
        return grad(lambda w: functional_call(net, {"weight": w}, (own,)).square().sum())(net.weight)

    with choosing(any_layer) as made, as_products(choices_for(CPU, "tf32", torch.float64)):
        shared, inner, alone = vmap(conv)(x), vmap(lambda own: slope(conv, own))(x), conv(x[0])
    assert not made
    torch.testing.assert_close(shared, vmap(plain)(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(inner, vmap(lambda own: slope(plain, own))(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(alone, plain(x[0]), rtol=1e-10, atol=1e-10)


COMPILES = """
import pickle, sys
import holdfast
assert "triton" not in sys.modules and not any("stacked_convolution.op" in name for name in sys.modules)
import torch._inductor
torch._inductor.compile = lambda graph, *_, **__: print(graph.code)
pickle.load(sys.stdin.buffer).compiled()
"""


def in_a_process(code: str, given: bytes = b"", **variables: str) -> str:
    places = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        env={**os.environ, "PYTHONPATH": places, **variables},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.slow
def test_a_process_that_compiles_ahead_knows_the_operations() -> None:
    with choosing(any_layer):
        alone = Traced.of(program()[0].traced()).operations
    assert isinstance(alone, Operations)
    said = in_a_process(COMPILES, pickle.dumps(alone))
    assert said.count("torch.ops.holdfast.") == alone.text.count("torch.ops.holdfast.") == 5


def test_kernels_of_another_version_are_refused() -> None:
    from holdfast.models.stacked_convolution import operations

    layer, blocks = any_layer(Shape(1, 1, 4, 1, 3)).numbers()
    about: tuple[Any, ...] = (layer, blocks, "float64", operations.VERSION + 1)
    with pytest.raises(RuntimeError, match="compiled code asks for kernels of version"):
        torch.ops.holdfast.gradient_of_images(torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 1, 1, 3, 3), *about)


def test_where_a_kernel_fails_products_take_its_place(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from holdfast.models.stacked_convolution import operations

    monkeypatch.setattr(use, "_given_up", [])
    monkeypatch.setitem(sys.modules, "holdfast.models.stacked_convolution.kernels", None)
    layer, blocks = any_layer(Shape(1, 1, 4, 1, 3)).numbers()
    about: tuple[Any, ...] = (layer, blocks, "float64", operations.VERSION)
    g, weight = torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 1, 1, 3, 3)
    with pytest.raises(KernelFailed) as failed:
        torch.ops.holdfast.gradient_of_images(g, weight, *about)

    made: list[bool] = []

    def step(structure: Any, stack: Any, traced: Any = None) -> Any:
        made.append(choices_for(GPU, "tf32", torch.float32) is not None)
        if made[-1]:
            raise failed.value
        return "made"

    structure, stack = program()[0].structure, cast(Stack, None)
    monkeypatch.setattr(programs, "Program", step)
    assert programs._made(structure, stack) == "made" and made == [True, False]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("kernels for convolutions failed (") and "\n" not in line


# ---- what is computed

WHOLE_STEP = """
import torch
from tests.models.test_stacked_convolution import any_layer, operations_of, program
from holdfast.models.stacked_convolution.shape import Choice
from holdfast.models.stacked_convolution.use import choosing
for dtype, mode, near in ((torch.float64, "float64", 1e-10), (torch.float32, "tf32", 1e-5)):
    own, _ = program(dtype)
    luck = torch.Generator().manual_seed(0)
    for name, value in own.memory.items():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=luck, dtype=value.dtype) - 0.5)
    size = own.structure.batch_size
    own.memory["now"][:, : 2 * size] = torch.randint(3, (4, 2 * size), generator=luck)
    own.memory["now"][:, 2 * size] = size
    own.memory["now"][:, 2 * size + 1] = 1
    products = own.traced()(own.memory)
    with choosing(lambda shape: Choice(shape, any_layer(shape).blocks, mode)):
        traced = own.traced()
    assert len(operations_of(traced)) == 5
    for name, value in traced(own.memory).items():
        assert not torch.equal(products[name], own.memory[name]) or not name.startswith("params")
        torch.testing.assert_close(value, products[name], rtol=near, atol=near)
"""


@NEEDS_TRITON
@pytest.mark.slow
def test_a_whole_step_by_kernels_equals_one_by_products() -> None:
    in_a_process(WHOLE_STEP, TRITON_INTERPRET="1")
