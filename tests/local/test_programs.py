"""Training by replaying programs: the same numbers as the loop, few programs for many stacks, and a way out
where one cannot be made.

On a CPU a program runs as it stands; what a compiler would be given is traced here and compared as well."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.local import device_trials, plan_choice, program, programs
from holdfast.local.augment import Augment
from holdfast.local.fit import Recipe, fit, stack_of
from holdfast.local.losses import Batch
from holdfast.local.per_client import training
from holdfast.local.plan import Plan
from holdfast.local.program import Program
from holdfast.models import batched_convolution
from tests.helpers import LOOP, client_keys, deal, network_of, random_samples, starts, train

RECIPE = Recipe(lr=0.1, epochs=2, batch_size=4)
COMPILED = Plan("compiled-vmap")


@pytest.fixture(autouse=True)
def no_programs() -> Iterator[None]:
    programs.forget()
    programs._said.clear()
    yield
    programs.forget()


def images() -> nn.Module:
    """Every layer that is treated specially, with strides, padding, dilation and groups."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, bias=False),
        nn.GroupNorm(2, 6),
        nn.Conv2d(6, 6, 1, groups=2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(6, 3),
    )


def kept() -> list[Program]:
    return list(programs._programs.values())


def test_one_program_serves_all_rounds_and_methods_with_and_without_a_pull() -> None:
    samples = random_samples(60)
    network, data = network_of(lambda: nn.Linear(3, 3)), deal(samples, [8, 4, 12])
    model = starts(network, 3)
    train(network, model, samples, data, RECIPE, COMPILED)
    train(
        network,
        model * 2,
        samples,
        data,
        replace(RECIPE, lr=torch.tensor([0.1, 0.2, 0.3]), epochs=1),
        COMPILED,
        seed=5,
    )
    train(network, model, samples, data, replace(RECIPE, weight_decay=0.1), COMPILED, pull=(model, 0.5))
    assert len(kept()) == 1
    train(network, model, samples, data, replace(RECIPE, momentum=0.9), COMPILED)
    assert len(kept()) == 2


def test_only_the_programs_of_one_plan_are_kept() -> None:
    samples = random_samples(60)
    network, data = network_of(lambda: nn.Linear(3, 3)), deal(samples, [8, 4, 12])
    for name in ("captured-loop", "captured-vmap", "compiled-vmap"):
        train(network, starts(network, 3), samples, data, RECIPE, Plan(name))
    other = network_of(lambda: nn.Linear(3, 3, bias=False))
    train(other, starts(other, 3), samples, data, RECIPE, Plan("captured-loop"))
    programs.forget(network.signature, but="captured-vmap")
    left = {(made.structure.signature, made.structure.plan) for made in kept()}
    assert left == {
        (network.signature, "captured-vmap"),
        (other.signature, "captured-loop"),
    }, "another network's stay"
    programs.forget()
    assert not kept()


def test_stacks_of_many_sizes_share_programs_and_rows_move_to_smaller_ones() -> None:
    samples = random_samples(200)
    network, counts = network_of(lambda: nn.Linear(3, 3)), [4, 40, 8, 4, 4, 24, 4]
    data, model = deal(samples, counts), starts(network, 7)
    plan = Plan("compiled-vmap", sizes=(2, 4, 8))
    recipe = replace(RECIPE, momentum=0.9)
    got = train(network, model, samples, data, recipe, plan)
    assert sorted(p.structure.size for p in kept()) == [2, 4, 8]  # 7 rows begin; 3 go on, then 2
    want = train(network, model, samples, data, recipe, LOOP)
    torch.testing.assert_close(got.model, want.model, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=1e-12)
    six = deal(samples, counts[:6])
    few = fit(network, model[:6], samples, six, client_keys(6), recipe, plan)  # a ban later
    assert len(kept()) == 3
    torch.testing.assert_close(
        few.model, train(network, model[:6], samples, six, recipe, LOOP).model, rtol=0, atol=1e-12
    )


def test_more_rows_than_the_largest_size_are_cut() -> None:
    samples = random_samples(100)
    network, data = network_of(lambda: nn.Linear(3, 3)), deal(samples, [5] * 7)
    model = starts(network, 7)
    got = train(network, model, samples, data, RECIPE, Plan("compiled-vmap", sizes=(3,)))
    assert {p.structure.size for p in kept()} == {3}
    torch.testing.assert_close(
        got.model, train(network, model, samples, data, RECIPE, LOOP).model, rtol=0, atol=1e-12
    )


def test_a_stack_much_smaller_than_the_program_is_trained_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Plan("compiled-vmap", sizes=(100,)).attempts(25) == ("compiled-vmap", "captured-vmap", "vmap")
    assert Plan("compiled-vmap", sizes=(100,)).attempts(24) == ("vmap",)
    assert Plan("captured-loop").attempts(1) == ("captured-loop", "loop")


@pytest.mark.parametrize("name", ["compiled-vmap", "captured-vmap", "captured-loop", "compiled-loop"])
def test_where_no_program_can_be_made_the_next_best_plan_runs_and_the_log_says_so(
    name: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    samples = random_samples(60)
    network, data = network_of(lambda: nn.Linear(3, 3)), deal(samples, [8, 4, 12])
    model = starts(network, 3)

    def broken(self: Program, *args: Any) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(Program, "__init__", broken)
    before = programs.refusals()
    with caplog.at_level(logging.WARNING, "holdfast.local"):
        got = [train(network, model, samples, data, RECIPE, Plan(name)).model for _ in range(2)]
    torch.testing.assert_close(
        got[0], train(network, model, samples, data, RECIPE, LOOP).model, rtol=0, atol=1e-12
    )
    assert torch.equal(*got)
    tried = len(Plan(name).attempts(3)) - 1
    assert programs.refusals() == before + 2 * tried  # of two trainings
    assert (
        len(caplog.messages) == tried
        and "no such kernel" in caplog.messages[0]
        and name in caplog.messages[0]
    )


def test_an_error_of_the_user_is_raised_and_no_other_plan_is_tried() -> None:
    samples = random_samples(20)
    network, data = network_of(lambda: nn.Linear(3, 3)), deal(samples, [8, 4])

    def wrong(net: nn.Module, batch: Batch) -> Tensor:
        return net(batch.x).mean()

    from holdfast.core.errors import ConfigError

    with pytest.raises(ConfigError, match="one value per sample"):
        train(network, starts(network, 2), samples, data, replace(RECIPE, loss=wrong), COMPILED)


def test_a_loss_made_anew_is_the_same_and_one_that_holds_tensors_is_not_replayed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A method's closure over numbers serves every round; over a tensor of this round, a program would go on
    with the old one."""
    samples = random_samples(40)
    network, data = network_of(lambda: nn.Linear(3, 3)), deal(samples, [8, 4])
    model = starts(network, 2)

    def scaled(by: Any) -> Any:
        return lambda net, batch: by * nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none")

    for _ in range(2):
        twice = train(network, model, samples, data, replace(RECIPE, loss=scaled(2.0)), COMPILED).model
    assert len(kept()) == 1
    with caplog.at_level(logging.WARNING, "holdfast.local"):
        for factor in (2.0, 3.0):
            got = train(
                network,
                model,
                samples,
                data,
                replace(RECIPE, loss=scaled(torch.tensor(factor).double())),
                COMPILED,
            ).model
            want = train(network, model, samples, data, replace(RECIPE, loss=scaled(factor)), LOOP).model
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert len(kept()) == 1 and not torch.equal(twice, got)
    assert caplog.messages and all("aux" in line for line in caplog.messages)


@pytest.mark.parametrize(
    "augment", [Augment(), Augment(crop=1, flip=0.5, jitter=0.2)], ids=["plain", "augmented"]
)
def test_what_a_compiler_is_given_computes_the_step(augment: Augment) -> None:
    """Traced with convolutions as matrix products: all of a step, also for rows that are done and batches
    that are padded."""
    samples = random_samples(40, (2, 12, 12))
    network, data = network_of(images), deal(samples, [8, 3, 6])
    recipe = replace(RECIPE, augment=augment, momentum=0.5, weight_decay=0.01)
    train(network, starts(network, 3), samples, data, recipe, Plan("compiled-vmap", sizes=(5,)))
    (ready,) = kept()
    traced = ready.traced()
    names = [str(node.target) for node in traced.graph.nodes]
    assert (
        names.count("aten.convolution.default") == 1 and "aten.col2im.default" not in names
    )  # the one with groups stays as it is
    now = ready.memory["now"]
    now[:, -4], now[:3, -3] = torch.tensor([4, 3, 2, 0, 0]), torch.tensor([1, 0, 1])
    want, got = ready._step(ready.memory), traced(ready.memory)
    assert want.keys() == got.keys() and torch.equal(got["losses"][1], ready.memory["losses"][1])
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-12)


def test_a_single_clients_step_can_be_traced() -> None:
    samples = random_samples(40, (2, 12, 12))
    network, data = network_of(images), deal(samples, [8, 3])
    train(network, starts(network, 2), samples, data, RECIPE, Plan("captured-loop"))
    (ready,) = kept()
    inputs = ready._inputs_alone()
    want, got = ready._gradients_alone(*inputs), program._traced(ready._gradients_alone, *inputs)(*inputs)
    for a, b in zip(want[0], got[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(want[1], got[1], rtol=0, atol=1e-12)


def test_a_single_clients_weights_lie_as_cudnn_reads_them_and_train_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = random_samples(40, (2, 12, 12))
    network, data = network_of(images), deal(samples, [8, 3])
    recipe, model = replace(RECIPE, momentum=0.5, weight_decay=0.01), starts(network, 2)
    want = train(network, model, samples, data, recipe, LOOP).model
    advance = Program._advance

    def as_on_a_gpu(own: Program) -> Any:
        traced = own.traced()
        monkeypatch.setattr(own, "_gradients_alone", traced)
        return advance(own)

    monkeypatch.setattr(Program, "_advance", as_on_a_gpu)
    got = train(network, model, samples, data, recipe, Plan("compiled-loop")).model
    (ready,) = kept()
    assert ready.memory["params.0.weight"][0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_clients_that_train_side_by_side_train_as_they_do_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = random_samples(60, (2, 12, 12))
    network, data = network_of(images), deal(samples, [8, 0, 4, 12, 3])
    recipe = replace(RECIPE, momentum=0.5, lr=torch.tensor([0.1, 0.2, 0.3, 0.1, 0.2]))
    model, plan = starts(network, 5), Plan("captured-loop")
    want = train(network, model, samples, data, recipe, plan)
    assert len(kept()) == 1
    monkeypatch.setattr(programs, "lanes", lambda rows, device: min(rows, 3))
    got = train(network, model, samples, data, recipe, plan)
    assert [own.structure.lane for own in kept()] == [0, 1, 2]
    assert torch.equal(got.model, want.model) and torch.equal(got.loss, want.loss)

    programs.forget()
    made = Program.__init__

    def room_for_one(self: Program, structure: program.Structure, *given: Any, **named: Any) -> None:
        if structure.lane:
            raise torch.OutOfMemoryError
        made(self, structure, *given, **named)

    monkeypatch.setattr(Program, "__init__", room_for_one)
    assert torch.equal(train(network, model, samples, data, recipe, plan).model, want.model)


def test_few_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MOST", 2)
    samples = random_samples(20)
    network = network_of(lambda: nn.Linear(3, 3))
    for n in (1, 2, 3, 2):
        train(network, starts(network, n), samples, deal(samples, [4] * n), RECIPE, COMPILED)
    assert [p.structure.size for p in kept()] == [3, 2]


@pytest.mark.parametrize("plan", ["loop", "vmap", "captured-loop", "compiled-vmap"])
def test_bf16_multiplies_in_bfloat16_and_updates_in_float32(plan: Any) -> None:
    samples = random_samples(40)
    network, data = network_of(lambda: nn.Linear(3, 3), torch.float32), deal(samples, [8, 8])
    model = starts(network, 2)
    exact = train(network, model, samples, data, RECIPE, Plan(plan)).model
    rough = train(network, model, samples, data, RECIPE, Plan(plan, precision="bf16")).model
    assert rough.dtype == torch.float32
    assert 0 < float((exact - rough).abs().max()) < 0.02
    assert bool((rough.bfloat16().float() != rough).any())  # parameters are not rounded


@pytest.mark.parametrize("plan", ["loop", "vmap", "captured-loop", "compiled-vmap"])
def test_with_activations_in_bfloat16_a_network_is_trained_almost_as_in_float32(plan: Any) -> None:
    """Within 0.02 of each value, where two epochs moved them by up to 0.3."""
    samples = random_samples(40, (2, 12, 12))
    network, data = network_of(images, torch.float32), deal(samples, [8, 7])
    model = starts(network, 2)
    exact = train(network, model, samples, data, RECIPE, Plan(plan)).model
    rough = train(network, model, samples, data, RECIPE, Plan(plan, precision="bf16-activations")).model
    assert rough.dtype == torch.float32
    assert 0 < float((exact - rough).abs().max()) < 0.02
    assert float((exact - model).abs().max()) > 0.2


def test_activations_are_bfloat16_and_the_loss_and_its_gradients_float32() -> None:
    seen: dict[str, torch.dtype] = {}

    def watch(name: str) -> Any:
        def hook(_layer: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            seen[name] = inputs[0].dtype

        return hook

    samples = random_samples(40, (2, 12, 12))
    network, data = network_of(images, torch.float32), deal(samples, [8])

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        hooks = [layer.register_forward_hook(watch(name)) for name, layer in net.named_children()]
        out = net(batch.x)
        for hook in hooks:
            hook.remove()
        seen["loss"] = out.dtype
        return torch.nn.functional.cross_entropy(out, batch.y, reduction="none")

    plan = Plan("loop", precision="bf16-activations")
    train(network, starts(network, 1), samples, data, replace(RECIPE, loss=loss), plan)
    assert seen.pop("loss") == torch.float32
    assert set(seen.values()) == {torch.bfloat16} and len(seen) == 10
    assert not any(layer._forward_hooks for layer in network.module.modules()), "nothing is left behind"


def test_layers_that_vmap_hides_from_autocast_are_computed_in_bfloat16_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU convolutions of a stack are vmap's own."""
    monkeypatch.setattr(batched_convolution, "_foldable", lambda x: False)

    def signals() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.PReLU(), nn.Conv1d(4, 4, 3), nn.LayerNorm(8)),
            *(nn.Flatten(), nn.Linear(32, 3)),
        )

    for make, shape in ((images, (2, 12, 12)), (signals, (2, 12))):
        samples = random_samples(40, shape)
        network, data = network_of(make, torch.float32), deal(samples, [8, 7])
        model = starts(network, 2)
        exact = train(network, model, samples, data, RECIPE, LOOP).model
        for plan in ("loop", "captured-vmap"):
            got = train(network, model, samples, data, RECIPE, Plan(plan, precision="bf16-activations"))  # type: ignore[arg-type]
            assert 0 < float((exact - got.model).abs().max()) < 0.03


def test_float64_models_are_never_rounded() -> None:
    samples = random_samples(40, (2, 12, 12))
    network, data = network_of(images), deal(samples, [8, 7])
    model = starts(network, 2)
    got = train(network, model, samples, data, RECIPE, Plan("vmap", precision="bf16-activations"))
    want = train(network, model, samples, data, RECIPE, LOOP)
    torch.testing.assert_close(got.model, want.model, rtol=0, atol=1e-12)


def measured(plans: dict[str, Plan], trial: Any, client_steps: float, rows: int = 20) -> dict[str, float]:
    """What trials as on a device measure, here on the CPU."""
    trials = device_trials.measured(plans, trial, rows, client_steps, (rows,), torch.device("cpu"), "")
    return dict(device_trials.finished(trials).times)


def test_on_a_device_the_best_that_can_be_captured_is_chosen_and_compiling_has_to_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice itself, with times as a GPU would have them."""
    micro = {
        "captured-loop": 200.0,
        "captured-vmap": 60.0,
        "compiled-vmap": 30.0,
        "loop": 2000.0,
        "vmap": 250.0,
    }

    class Trial:
        def __init__(self) -> None:
            self.asked: list[str] = []

        def seconds(self, plan: Plan, rows: int, steps: int) -> float:
            self.asked.append(plan.name)
            return micro[plan.name] * 1e-6

        def traced(self, plan: Plan, rows: int) -> None:
            return None

    plans = {name: Plan(name, sizes=(20,)) for name in ("captured-loop", "captured-vmap", "compiled-vmap")}  # type: ignore[arg-type]
    short, long = Trial(), Trial()
    assert set(measured(plans, short, 1000)) == {"captured-loop", "captured-vmap"}
    assert "compiled-vmap" not in short.asked
    assert measured(plans, long, 1e7) == pytest.approx({name: micro[name] for name in plans})


def test_a_model_that_cannot_be_stacked_is_trained_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """vmap knows no LSTM: on a device too, the choice falls on what can run."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.cells(x[:, None])[0][:, -1])

    samples = random_samples(40)
    network, data = network_of(Recurrent), deal(samples, [8, 4])
    trial = plan_choice._Trial(network, starts(network, 1)[0], samples, data, RECIPE)
    plans = {
        name: Plan(name, sizes=(2,) if "vmap" in name else ())
        for name in ("captured-loop", "captured-vmap", "compiled-vmap")
    }  # type: ignore[arg-type]
    assert list(measured(plans, trial, 1e9, rows=2)) == ["captured-loop"]


def test_a_second_attempt_has_the_memory_of_the_first() -> None:
    """An error keeps all that the functions it passed through had made."""
    made: list[weakref.ref[Tensor]] = []

    def work() -> str:
        if made:
            assert made[0]() is None
            return "done"
        held = torch.ones(3)
        made.append(weakref.ref(held))
        raise torch.OutOfMemoryError("none left")

    assert programs.with_room(work) == "done"


@pytest.mark.slow
def test_a_step_that_was_traced_reads_the_samples_of_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures name samples by their id, which others may get once these are gone."""
    network, data = network_of(lambda: nn.Linear(3, 3)), deal(random_samples(20), [4, 5])

    def step(seed: int) -> tuple[int, Tensor]:
        samples = random_samples(20, seed=seed)
        with training():
            stack = stack_of(network, starts(network, 2), samples, data, client_keys(2), RECIPE)
            traced = programs.traced(stack, 2, COMPILED)
        assert traced is not None
        gc.collect()
        return id(samples), next(held for held in traced.constants if held.shape == samples.x.shape)

    ids = set()
    for seed in range(5):
        place, read = step(seed)
        ids.add(place)
        assert read.equal(random_samples(20, seed=seed).x)
    assert len(ids) == 5
    programs.forget()
    assert not programs._traced
