"""Holdfast from Python: sections or a Config, objects for names, resuming what a file cannot hold."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from holdfast.api import fresh_folder
from holdfast.core.errors import ConfigError, RunError
from holdfast.engine.client_stack import ClientStack
from holdfast.engine.simulator import Simulator
from holdfast.experiment.config import TrainSettings
from holdfast.methods.ditto import Ditto
from holdfast.report.rerun_config import as_text
from tests.experiment.sessions import TINY, config

REPOSITORY = Path(__file__).resolve().parents[1]


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x.flatten(1)).relu())


def my_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(net(batch.x), batch.y, reduction="none")


def objects(model: holdfast.Model) -> dict[str, Any]:
    return {**TINY, "model": model, "train": {**TINY["train"], "loss": my_loss}}


# ---- imports


def modules_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    return set(done.stdout.split())


def test_importing_holdfast_is_light() -> None:
    loaded = modules_after("import holdfast; holdfast.__version__, holdfast.HoldfastError, dir(holdfast)")
    assert not loaded & {"torch", "pandas", "numpy", "plotly", "flwr", "ray", "pyarrow"}


def test_a_whole_run_needs_neither_flower_nor_ray(tmp_path: Path) -> None:
    sections = "train={'rounds': 1, 'local_steps': 1}, engine={'plan': 'loop', 'threads': 1}"
    code = f"import holdfast; holdfast.run(out={str(tmp_path / 'run')!r}, {sections})"
    assert not modules_after(code) & {"flwr", "ray"}


def test_public_names() -> None:
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'ran'"):
        holdfast.ran  # noqa: B018


def examples(of: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(of.__doc__ or "")


def test_every_public_name_is_listed_and_has_an_example() -> None:
    assert set(holdfast.__all__) | {"open", "__version__"} == set(dir(holdfast))
    public = [getattr(holdfast, name) for name in dir(holdfast) if name != "__version__"]
    assert [one.__name__ for one in public if not examples(one)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*holdfast.__all__, "open"}))
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda page: True)
    monkeypatch.setattr(TrainSettings.model_fields["rounds"], "default", 1)
    Path("config.toml").write_text(as_text(TINY))
    Path("mine.py").write_text(
        "import holdfast\nfrom holdfast.methods.fedavg import FedAvg\n\n\n"
        "@holdfast.register('method', 'mine')\nclass Mine(FedAvg):\n    '''Mine.'''\n"
    )
    for folder in ("first", "mine"):
        model = holdfast.Model(Net, head="fc") if folder == "mine" else TINY["model"]
        holdfast.run({**TINY, "model": model}, out=f"runs/{folder}", train={"rounds": 3})
    table = holdfast.sweep(TINY, out="runs/table", method=["fedavg", "ditto"], seed=[0, 1])
    x, y = torch.randint(0, 17, (60, 1, 8, 8), dtype=torch.uint8), torch.arange(60) % 2  # digits
    names = {"holdfast": holdfast, "Ditto": Ditto, "Net": Net, "run": table[2].run, "sweep": table}
    names |= {"X": x, "y": y, "X0": x, "y0": y, "X1": x, "y1": y}
    of = getattr(holdfast, name)
    members = [] if name not in ("Run", "Sweep") else [m for m in vars(of).values() if callable(m)]
    for example in [example for one in (of, *members) for example in examples(one)]:
        exec(compile(example.source, name, "single"), names)


# ---- running


def test_sections_a_table_and_a_config_are_the_same(tmp_path: Path) -> None:
    runs = [
        holdfast.run(out=tmp_path / "a", **TINY),
        holdfast.run(TINY, out=tmp_path / "b"),
        holdfast.run(config(), out=tmp_path / "c"),
        holdfast.run({**TINY, "method": "fedavg"}, out=tmp_path / "d", method=Ditto()),
    ]
    assert (
        all(torch.equal(run.vector(1), runs[0].vector(1)) for run in runs)
        and runs[3].manifest["config"]["method"]["name"] == "ditto"
    )
    assert holdfast.run(config(), out=tmp_path / "e", seed=3).manifest["config"] == config(seed=3).plain()


def test_a_keyword_section_changes_only_what_it_names(tmp_path: Path) -> None:
    given = holdfast.run(TINY, out=tmp_path / "run", train={"rounds": 1}, method={"name": "fedavg"}).manifest[
        "config"
    ]
    assert (
        given["train"] == {**config().plain()["train"], "rounds": 1} and given["method"]["name"] == "fedavg"
    )
    planned = holdfast.plan(TINY, out=tmp_path / "plan", train={"rounds": 1})
    assert planned.client_steps == 4 * 3 * 2, (
        "4 clients, 15 samples in batches of 5, two models of ditto, one epoch of one round"
    )


def test_a_config_may_be_the_path_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(as_text(TINY))
    whole = holdfast.run(TINY, out=tmp_path / "whole")
    for place, path in enumerate((file, str(file))):
        run = holdfast.run(path, out=tmp_path / f"run{place}")
        assert torch.equal(run.vector(1), whole.vector(1))
    (tmp_path / "run0" / "result.json").unlink()
    assert isinstance(holdfast.resume(tmp_path / "run0", config=file), holdfast.Run)
    file.write_text(as_text({**TINY, "sweep": {"seed": [0, 1]}}))
    assert [cell.label for cell in holdfast.sweep(file, out=tmp_path / "sweep")] == ["seed=0", "seed=1"]
    with pytest.raises(ConfigError, match="tune compares trials on validation data"):
        holdfast.tune(str(file), 1, out=tmp_path / "tuned")
    with pytest.raises(ConfigError, match="a sweep; use holdfast.sweep"):
        holdfast.run(file)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("no.toml", "config file not found: no.toml"),
        (["a"], "a table, a Config or the path of a TOML file, not ['a']"),
    ],
)
def test_an_invalid_config_is_refused_in_one_line(tmp_path: Path, wrong: Any, words: str) -> None:
    for run_with in (
        holdfast.sweep,
        lambda given, out: holdfast.tune(given, 1, out=out),
        holdfast.run,
    ):
        with pytest.raises(ConfigError) as error:
            run_with(wrong, out=tmp_path / "out")
        assert words in str(error.value) and "\n" not in str(error.value)


def test_the_default_folder_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = holdfast.run(**TINY)
    assert first.path.parent == Path("runs") and first.final
    taken = fresh_folder()
    taken.mkdir(exist_ok=True)
    assert fresh_folder() != taken


def test_resume_by_path(tmp_path: Path) -> None:
    whole = holdfast.run(config(), out=tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    again = holdfast.resume(tmp_path / "run")
    assert isinstance(again, holdfast.Run) and again.final == whole.final


def test_resume_of_a_sweep_gives_all_its_runs(tmp_path: Path) -> None:
    from holdfast.sweeps.session import start

    start([("a", config()), ("b", config(seed=1))], tmp_path / "sweep")
    runs = holdfast.resume(tmp_path / "sweep")
    assert isinstance(runs, list) and [run.manifest["label"] for run in runs] == ["a", "b"]
    start([("a", config()), ("b", config(seed=1))][:1], tmp_path / "single")
    assert isinstance(holdfast.resume(tmp_path / "single"), holdfast.Run)


# ---- objects that a file cannot hold


def stop_in_round(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Simulator.exchange

    def strike(self: Simulator, calls: Any) -> Any:
        if calls[0].run_context.round == number:
            raise KeyboardInterrupt
        return exchange(self, calls)

    monkeypatch.setattr(Simulator, "exchange", strike)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_module_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: bool) -> None:
    """Given as a module (its weights are the start) or as a function that makes one; stopped, and resumed
    with the same config."""
    torch.manual_seed(3)
    module = Net()
    before = [p.detach().clone() for p in module.parameters()]

    def make() -> holdfast.Model:
        return holdfast.Model(module if fixed else Net, head="fc")

    whole = holdfast.run(objects(make()), out=tmp_path / "whole")
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True)), (
        "the user's module is left alone"
    )
    assert isinstance(whole.model(client=2), Net) and whole.model(client=2) is not module
    with monkeypatch.context() as patch:
        stop_in_round(2, patch)
        assert holdfast.run(objects(make()), out=tmp_path / "cut").status == "begun"
    for use in (lambda: holdfast.resume(tmp_path / "cut"), lambda: holdfast.Run(tmp_path / "cut").model()):
        with pytest.raises(ConfigError) as error:
            use()
        assert (
            "model was a Python object" in str(error.value)
            and ", model=" in str(error.value)
            and "\n" not in str(error.value)
        )
    assert len(holdfast.Run(tmp_path / "cut").metrics) == 1, "figures need no model"
    assert len(holdfast.load(tmp_path / "cut")) == 1
    resumed = holdfast.resume(tmp_path / "cut", config=objects(make()))
    assert isinstance(resumed, holdfast.Run)
    for client in (None, *range(4)):
        assert torch.equal(resumed.vector(client), whole.vector(client))
    assert torch.equal(holdfast.Run(tmp_path / "cut", config(**objects(make()))).vector(1), whole.vector(1))


def test_a_run_older_than_a_setting_continues(tmp_path: Path) -> None:
    holdfast.run(objects(holdfast.Model(Net, head="fc")), out=tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["config"]["evaluate"]["metrics"], manifest["samples"], manifest["weights"]
    file.write_text(json.dumps(manifest))
    (tmp_path / "run" / "result.json").unlink()
    assert (
        holdfast.resume(tmp_path / "run", config=objects(holdfast.Model(Net, head="fc"))).final["accuracy"]
        is not None
    )


def test_another_config_or_module_is_noticed(tmp_path: Path) -> None:
    holdfast.run(objects(holdfast.Model(Net, head="fc")), out=tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    for section, key in (
        ({"seed": 1}, "seed"),
        ({"privacy": {"noise": 1.0}}, "privacy"),
        ({"train": {"lr": 7.0}}, "train.lr"),
    ):
        with pytest.raises(ConfigError, match=f"began with another config than the one given: {key} differs"):
            holdfast.resume(tmp_path / "run", config=objects(holdfast.Model(Net, head="fc")), **section)
    with pytest.raises(RunError, match="weights the run began with"):
        holdfast.resume(tmp_path / "run", config=objects(holdfast.Model(lambda: Net(6), head="fc")))


def test_a_bare_module_has_its_linear_layer_with_one_output_per_class_as_head(tmp_path: Path) -> None:
    def run(model: Any, name: str) -> holdfast.Run:
        return holdfast.run({**TINY, "model": model, "method": "fedper"}, out=tmp_path / name)

    module = Net()
    named = run(holdfast.Model(module, head="fc"), "named").final["accuracy"]
    assert run(module, "bare").final["accuracy"] == named
    made = run(holdfast.Model(Net, head="fc"), "made").final["accuracy"]
    assert run(Net, "class").final["accuracy"] == made
    assert run(lambda shape, classes: Net(), "function").final["accuracy"] == made
    with pytest.raises(ConfigError, match="2 linear layers .1, 2. have 10 outputs.*holdfast.Model"):
        holdfast.run(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 10)))
    with pytest.raises(ConfigError, match="no linear layer has 10 outputs.*head=None"):
        holdfast.run(model=nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()))


def test_a_wrong_name_for_the_head_is_a_clear_error() -> None:
    for method in ("fedavg", "apfl", "fedgc"):  # the last two build something around the module
        with pytest.raises(ConfigError, match="no submodule named 'fx' for the head; did you mean 'fc'"):
            holdfast.run(model=holdfast.Model(Net, head="fx"), method=method)


class Stray(nn.Module):
    """The second output is not what is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x.flatten(1)), x


@pytest.mark.parametrize(
    "module, words",
    [
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 10)),
            "'lambda' cannot read samples of shape [1, 8, 8] of 'digits' (10 classes): layer '1', Linear(",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 7)),
            "'Sequential': has 7 outputs, but 'digits' has 10 classes; it needs 10 or more",
        ),
        (
            Stray,
            (
                "'Stray': returns a tuple for a batch of shape [2, 1, 8, 8]; it must return a tensor"
                " [2, 10], one row per sample"
            ),
        ),
        (
            nn.Linear(8, 10),
            (
                "'Linear(in_features=8,out_features=10)': returns shape [2, 1, 8, 10] for a batch of shape"
                " [2, 1, 8, 8]; it"
            ),
        ),
    ],
)
def test_a_module_that_does_not_fit_the_data_is_one_line_before_anything_is_written(
    tmp_path: Path, module: Any, words: str
) -> None:
    given = {**TINY, "model": holdfast.Model(module, head=None), "method": "fedavg"}
    for run_with in (
        holdfast.run,
        lambda table, out: holdfast.sweep({**table, "sweep": {"seed": [0, 1]}}, out=out),
    ):
        with pytest.raises(ConfigError) as error:
            run_with(given, out=tmp_path / "run")
        assert str(error.value).startswith(f"model {words}") and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_error_in_the_forward_of_a_module_keeps_its_own_traceback(tmp_path: Path) -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("forward fell")

    given = {**TINY, "model": holdfast.Model(Broken, head="fc")}
    with pytest.raises(
        ConfigError, match=r"model 'Broken' .*ZeroDivisionError: forward fell \(test_api.py, line"
    ) as error:
        holdfast.run(given, out=tmp_path / "run")
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(
        ConfigError, match="in the sweep's cell 'seed=1'|in the sweep's cell 'seed=0'"
    ) as error:
        holdfast.sweep({**given, "sweep": {"seed": [0, 1]}}, out=tmp_path / "sweep")
    assert isinstance(error.value.__cause__.__cause__, ZeroDivisionError)


def test_two_cells_with_one_module_are_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.sweeps.session import start

    sizes = []
    perform = ClientStack.perform
    monkeypatch.setattr(
        ClientStack,
        "perform",
        lambda self, calls, *rest: sizes.append(len(calls)) or perform(self, calls, *rest),
    )
    model = holdfast.Model(Net, head="fc")
    start([("a", config(model=model)), ("b", config(model=model, seed=1))], tmp_path / "sweep")
    assert set(sizes) == {2}
