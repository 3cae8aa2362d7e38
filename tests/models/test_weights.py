"""Pretrained weights: what is read is checked, what a run began with stays with the run, and nothing else
depends on the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.deploy.node import fingerprint
from holdfast.experiment.loop import Experiment
from holdfast.models.own_module import Model
from holdfast.models.weights import Weights
from holdfast.results.run import Run
from holdfast.storage.store import Store
from holdfast.sweeps.session import resume
from tests.helpers import assert_same, everything, run_all, tiny

CNN: dict[str, Any] = {"name": "cnn-bn", "channels": 2, "hidden": 3}


def state(classes: int = 10, seed: int = 5) -> dict[str, Tensor]:
    """A trained network's tensors, counters included."""
    torch.manual_seed(seed)
    module = build("model", CNN).build((1, 8, 8), classes)
    module(torch.randn(4, 1, 8, 8))
    return module.state_dict()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(state(), tmp_path / "start.safetensors")
    return tmp_path / "start.safetensors"


def experiment(tmp_path: Path, **model: Any) -> Experiment:
    return Experiment(tiny(model={**CNN, **model}), tmp_path / "run")


def named(run: Experiment) -> dict[str, Tensor]:
    return run.network.layout.tensors(run.initial)


# ---- what is read


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_run_starts_from_the_file(kind: torch.dtype, tmp_path: Path) -> None:
    kept = {name: value.to(kind) if value.is_floating_point() else value for name, value in state().items()}
    save_file(kept, tmp_path / "some.safetensors")
    start = named(experiment(tmp_path, weights=str(tmp_path / "some.safetensors")))
    assert start.keys() == kept.keys()
    for name, value in kept.items():
        assert torch.equal(start[name].double(), value.double())
    assert start["backbone.1.num_batches_tracked"] == 1


def test_a_fresh_head_is_that_of_a_run_without_the_file(tmp_path: Path) -> None:
    save_file(state(classes=7), tmp_path / "seven.safetensors")
    plain, start = (
        named(experiment(tmp_path)),
        named(experiment(tmp_path, weights=str(tmp_path / "seven.safetensors"), weights_head="fresh")),
    )
    for name, value in start.items():
        assert torch.equal(
            value,
            (
                plain[name].to(value.dtype)
                if name.startswith("head.")
                else state(classes=7)[name].to(value.dtype)
            ),
        )


def test_a_head_may_be_missing_where_it_is_fresh(tmp_path: Path) -> None:
    save_file(
        {name: value for name, value in state().items() if not name.startswith("head.")},
        tmp_path / "body.safetensors",
    )
    assert (
        experiment(tmp_path, weights=str(tmp_path / "body.safetensors"), weights_head="fresh")
        .initial.isfinite()
        .all()
    )
    with pytest.raises(
        ConfigError,
        match="lacks 'head.weight' and 1 more; model.weights_head = \"fresh\" leaves the file's head out",
    ):
        experiment(tmp_path, weights=str(tmp_path / "body.safetensors"))


def change(**changes: Tensor | None) -> dict[str, Tensor]:
    table = {**state(), **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in table.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (change(backbone__0__weight=None), "lacks 'backbone.0.weight'"),
        (change(backbone__0__weight=None, conv1=torch.zeros(1)), "lacks 'backbone.0.weight'; it has 'conv1'"),
        (change(fc=torch.zeros(1)), "has 'fc', which the model does not have"),
        (change(backbone__0__bias=torch.zeros(3)), "'backbone.0.bias' has shape [3] in"),
        (state(classes=7), "'head.weight' has shape [7, 3] in"),
        (change(backbone__0__bias=torch.tensor([0.0, torch.nan])), "'backbone.0.bias' in"),
        (
            change(backbone__0__bias=torch.tensor([0.0, 1e300], dtype=torch.float64)),
            "values that are not finite",
        ),
        (change(backbone__0__bias=torch.tensor([0, 1])), "'backbone.0.bias' is torch.int64 in"),
    ],
    ids=["missing", "other names", "extra", "shape", "classes", "nan", "too large", "whole numbers"],
)
def test_a_file_that_does_not_fit_is_a_one_line_error(
    content: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    save_file(content, tmp_path / "bad.safetensors")
    config = tiny(model={**CNN, "weights": str(tmp_path / "bad.safetensors")}, train={"dtype": "float32"})
    with pytest.raises(ConfigError) as error:
        Experiment(config, tmp_path / "run")
    assert (
        words in str(error.value)
        and str(error.value).startswith("model.weights")
        and "\n" not in str(error.value)
    )


def test_a_missing_file_and_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.weights: .*none.safetensors cannot be read: No such file"):
        experiment(tmp_path, weights=str(tmp_path / "none.safetensors"))
    torch.save(state(), tmp_path / "pickle.pt")
    with pytest.raises(ConfigError, match="pickle.pt is not a safetensors file"):
        experiment(tmp_path, weights=str(tmp_path / "pickle.pt"))


def test_a_users_own_module_can_start_from_a_file(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = (
                nn.Linear(64, 64, bias=False),
                nn.Linear(64, 64, bias=False),
                nn.Linear(64, 10),
            )
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.b(self.a(x.flatten(1)).relu()))

    wanted = {"a.weight": torch.randn(64, 64), "out.weight": torch.randn(10, 64), "out.bias": torch.randn(10)}
    for content in (wanted, {**wanted, "b.weight": wanted["a.weight"].clone()}):
        save_file(content, tmp_path / "tied.safetensors")
        start = Experiment(
            tiny(model=Model(Tied, head="out", weights=tmp_path / "tied.safetensors")), tmp_path / "run"
        )
        assert torch.equal(start.initial, start.network.layout.flatten(wanted).double())
    fresh = Experiment(
        tiny(model=Model(Tied, "out", tmp_path / "tied.safetensors", weights_head="fresh")), tmp_path / "run"
    )
    assert not torch.equal(named(fresh)["out.bias"], wanted["out.bias"].double())
    with pytest.raises(ConfigError, match='weights_head = "fresh" needs a head'):
        Weights.of(Model(Tied, None, tmp_path / "tied.safetensors", weights_head="fresh"))


# ---- runs


def test_an_exported_model_is_a_start(tmp_path: Path, simulate: Callable[..., Run]) -> None:
    first = simulate(model=CNN)
    save_file(first.model().state_dict(), tmp_path / "exported.safetensors")
    second = simulate(model={**CNN, "weights": str(tmp_path / "exported.safetensors")})
    torch.testing.assert_close(second._experiment.initial, first.vector().float().double(), rtol=0, atol=1e-7)


def test_the_manifest_names_the_file_by_its_content(file: Path, simulate: Callable[..., Run]) -> None:
    run = simulate(model={**CNN, "weights": str(file)})
    assert run.manifest["weights"] == {
        "file": str(file),
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    assert simulate(model=CNN).manifest["weights"] is None


def test_experiments_with_different_starts_are_fused(
    file: Path, tmp_path: Path, simulate_all: Callable[..., list[Run]]
) -> None:
    save_file(state(seed=6), tmp_path / "other.safetensors")
    tables = [{"model": {**CNN, "weights": str(name)}} for name in (file, tmp_path / "other.safetensors")] + [
        {"model": CNN}
    ]
    fused = simulate_all(tables)
    assert (
        len({run._experiment.run_context.plan_key for run in fused})
        == len({run._experiment.run_context.group("train")[2] for run in fused})
        == 1
    )
    for place, table in enumerate(tables):
        assert_same(
            everything(run_all([table], tmp_path / f"alone{place}")[0]), everything(fused[place]), 1e-10
        )


def test_a_run_resumes_without_its_file(
    file: Path, tmp_path: Path, quick_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`local` starts every client from the start model, also those that come late."""
    table: dict[str, Any] = {
        "model": {**CNN, "weights": str(file)},
        "method": "local",
        "train": {"rounds": 3, "participation": 0.4},
    }
    whole = run_all([table], tmp_path / "whole")[0]

    def stop(self: Store, round: int) -> None:
        commit(self, round)
        if round == 1:
            raise KeyboardInterrupt

    commit = Store.commit
    monkeypatch.setattr(Store, "commit", stop)
    with pytest.raises(KeyboardInterrupt):
        run_all([table], tmp_path / "cut")
    monkeypatch.setattr(Store, "commit", commit)
    file.unlink()
    resume(tmp_path / "cut")
    cut = Run(tmp_path / "cut")
    assert cut.round == 3
    assert_same(everything(cut), everything(whole), 0)
    (tmp_path / "cut" / "start.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="start.safetensors cannot be read"):
        Experiment(cut.config, cut.path)


def test_real_clients_may_keep_the_file_elsewhere_but_not_another(file: Path, tmp_path: Path) -> None:
    moved, other = tmp_path / "moved.safetensors", tmp_path / "other.safetensors"
    moved.write_bytes(file.read_bytes())
    save_file(state(seed=6), other)

    def world(path: Path) -> str:
        built = experiment(tmp_path, weights=str(path))
        return fingerprint(built.config, built.federation.digest, built.initial)

    assert world(file) == world(moved) != world(other)
    plain = experiment(tmp_path)
    assert fingerprint(plain.config, plain.federation.digest, plain.initial) not in (
        world(file),
        world(other),
    )


def test_a_whole_file_leaves_nothing_to_the_seed(file: Path, tmp_path: Path) -> None:
    network = experiment(tmp_path, weights=str(file)).network
    assert torch.equal(network.initial(Key(0)), network.initial(Key(1)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z, self.a = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.a.weight = self.z.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.z(x))


@pytest.mark.parametrize("name", ["z.weight", "a.weight"])
def test_a_tensor_with_two_names_may_have_either_in_the_file(name: str, tmp_path: Path) -> None:
    value = torch.arange(16.0).view(4, 4)
    save_file({name: value}, tmp_path / "tied.safetensors")
    assert torch.equal(Weights(str(tmp_path / "tied.safetensors")).into(Tied()).a.weight, value)


def test_fresh_heads_without_a_file_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='^model.weights_head = "fresh" .* set the file in model.weights'):
        experiment(tmp_path, weights_head="fresh")
    with pytest.raises(ConfigError, match="not 'Fresh'"):
        Model(nn.Linear(2, 2), weights="n.safetensors", weights_head="Fresh")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^model.weights: ~nobody-at-all/x cannot be read"):
        experiment(tmp_path, weights="~nobody-at-all/x")


def test_a_file_in_double_precision_keeps_its_bits_in_a_run_in_double_precision(tmp_path: Path) -> None:
    content = {
        name: value.double() + 1e-12 if value.is_floating_point() else value
        for name, value in state().items()
    }
    save_file(content, tmp_path / "double.safetensors")
    assert torch.equal(
        named(experiment(tmp_path, weights=str(tmp_path / "double.safetensors")))["head.weight"],
        content["head.weight"],
    )
