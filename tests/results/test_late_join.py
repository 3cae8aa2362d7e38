"""Clients that join after training: run.customise, and `holdfast customise` with data from a folder, a config
or a held-out client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.keys import Key
from holdfast.data.federation import Samples
from holdfast.experiment.loop import Experiment
from holdfast.local.fit import Recipe
from holdfast.methods.fedcap import customisation
from holdfast.results.late_join import NewClient, _as_run_samples, _context_with, from_config, join
from holdfast.results.run import Run
from tests.cli.commands import Answer, refused
from tests.data.folders import grey, write_images, write_table
from tests.helpers import run_all, slow_fit, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("joining") / "run"
    method = {"name": "fedcap", "alpha": 3.0}
    return run_all(
        [{"method": method, "data": {"clients": 7, "held_out": 2}, "train": {"participation": 0.6}}], out
    )[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_all([{"method": "fedavg"}], tmp_path_factory.mktemp("joining") / "run")[0]


def flat(run: Run, module: torch.nn.Module) -> Tensor:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return run._experiment.network.layout.flatten(
        {name: value.detach().double() for name, value in named.items()}
    )


def by_hand(run: Run, update: Tensor) -> Tensor:
    """The softmax of the cosines to all of the pool, without a self term."""
    state = run.state()
    cosines = torch.nn.functional.cosine_similarity(update[None], state["pool/updates"])
    return (
        customisation(cosines[None], torch.zeros(1, len(cosines), dtype=torch.bool), 3.0, 0.3)[0]
        @ state["pool/models"]
    )


def test_customise_by_hand(run: Run) -> None:
    update = Key(5).normal(run._experiment.network.layout.parameters, dtype=torch.float64)
    module = run.customise(update)
    assert not module.training
    torch.testing.assert_close(
        flat(run, module), by_hand(run, update), rtol=0, atol=1e-6
    )  # a module is of float32
    named = run._experiment.network.layout.unflatten(update)
    torch.testing.assert_close(flat(run, run.customise(named)), flat(run, module), rtol=0, atol=0)
    torch.testing.assert_close(flat(run, run.reference()), run.state()["previous"], rtol=0, atol=1e-6)


def test_a_new_client_is_customised_as_a_held_out_client_is(run: Run) -> None:
    """Training from the reference by hand, and then `customise`, gives the model that the evaluation
    measured."""
    experiment, client = run._experiment, run._experiment.federation.held_out[0]
    data = experiment.federation.train.take(torch.tensor([client]))
    exchanges = run.store.parts(2)[-1]["exchanges"]
    key = Key(0).fold("client", 2, exchanges).fold(torch.tensor([client])).fold("fit")
    start = run.state()["previous"]
    trained = slow_fit(
        experiment.network,
        start[None],
        experiment.federation.samples,
        data,
        key,
        Recipe(lr=0.1, epochs=1, batch_size=5),
    )[0]
    torch.testing.assert_close(
        by_hand(run, trained - start), run.vector(client, "customised"), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda v, named: v[:-1], r"the update has shape \(\d+,\), the model has \d+ parameters"),
        (lambda v, named: v * float("nan"), "update is not finite"),
        (lambda v, named: {k: named[k] for k in list(named)[1:]}, "the update has no '.*weight'"),
        (lambda v, named: {**named, "more": v}, "the model has no 'more'"),
        (lambda v, named: {**named, "head.bias": v}, r"'head.bias' has shape .* the model's is \(10,\)"),
    ],
    ids=["too short", "not a number", "a tensor is missing", "one too many", "wrong shape"],
)
def test_updates_that_do_not_fit(run: Run, spoil: Callable[..., Any], message: str) -> None:
    vector = torch.ones(run._experiment.network.layout.parameters, dtype=torch.float64)
    with pytest.raises(ConfigError, match=f"^customise: {message}"):
        run.customise(spoil(vector, run._experiment.network.layout.unflatten(vector)))


def test_a_new_client_to_an_attacked_run_is_honest(tmp_path: Path) -> None:
    """Its labels and what it sends stay unchanged, whichever of the run's clients attack and in
    which round."""
    attack = {"name": "label-flip", "fraction": 0.4, "redraw": True}
    experiment = Experiment(tiny(method="fedcap", attack=attack), tmp_path / "run")
    experiment.run_context.round = 2
    samples, ids = experiment.federation.samples, torch.tensor([5])
    cell = _context_with(experiment.run_context, NewClient(samples, np.arange(3, 7), np.arange(7, 9)))
    data, test = cell.data(ids), cell.test(ids)
    assert data.rows.tolist() == [[3, 4, 5, 6]] and data.labels.tolist() == [samples.y[3:7].tolist()]
    assert (
        test.rows.tolist() == [[7, 8]]
        and len(experiment.adversary.malicious)
        and not len(cell.adversary.malicious)
    )


def test_an_empty_pool_gives_the_global_model(simulate: Callable[..., Run]) -> None:
    run = simulate(method={"name": "fedcap", "t_norm": 1e-9})
    module = run.customise(torch.ones(run._experiment.network.layout.parameters))
    torch.testing.assert_close(flat(run, module), run.vector(), rtol=0, atol=1e-6)


def test_a_run_without_pools_says_what_to_set(simulate: Callable[..., Run]) -> None:
    run = simulate(method={"name": "fedcap", "customise": False})
    with pytest.raises(ConfigError, match="keeps no pools to customise a model from; set customise = true"):
        run.customise(torch.ones(3))


def test_a_run_of_another_method_names_the_method_that_has_the_result(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedavg")
    with pytest.raises(
        ConfigError, match=r"fedavg has no result 'customise' \(Return the model of .*\); fedcap has it"
    ):
        run.customise(torch.ones(3))
    assert not hasattr(run, "reference") and not hasattr(run, "referenec")


# ---- the command


def test_a_held_out_client_on_the_command_line(run: Run, cli: Callable[..., Answer], tmp_path: Path) -> None:
    client, file = run._experiment.federation.held_out[0], tmp_path / "mine.safetensors"
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    answer = cli("customise", run.path, "--client", client, "--out", file, "--json")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    measured = run.clients(late=True).set_index("client")["accuracy/customised"]
    assert said["model"] == str(file) and said["accuracy"] == pytest.approx(measured[client])
    tensors = load_file(file)
    got = run._experiment.network.layout.flatten({name: value.double() for name, value in tensors.items()})
    torch.testing.assert_close(got, run.vector(client, "customised"), rtol=0, atol=0)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before  # the run is as it was


def test_a_config_describes_the_joiner(run: Run, cli: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "new.toml").write_text(
        'seed = 5\n[data]\nclients = 3\npartition = { name = "iid", samples_per_client = 40 }\n'
    )
    refused(
        cli("customise", run.path, "--data", "new.toml"),
        "--client: new.toml describes 3 clients, from 0; give the number of the one that joins",
    )
    refused(
        cli("customise", run.path, "--data", "new.toml", "--client", 3), "describes clients 0 to 2, got 3"
    )
    answer = cli(
        "customise", run.path, "--data", "new.toml", "--client", 1, "--out", tmp_path / "m.safetensors"
    )
    assert (
        answer.code == 0
        and answer.out.startswith(f"{tmp_path / 'm.safetensors'}\naccuracy 0.")
        and "on its own 10 test samples" in answer.out
    )
    names = [
        cli("customise", run.path, "--data", "new.toml", "--client", c).out.splitlines()[0] for c in (0, 1)
    ]
    assert [Path(name).name for name in names] == [
        "customised-new-0.safetensors",
        "customised-new-1.safetensors",
    ]
    joined = join(run, from_config(run, tmp_path / "new.toml", 1))
    assert joined.samples == 30 and not torch.equal(joined.model, run.vector())


def test_a_folder_is_read_by_the_runs_source(cli: Callable[..., Answer], tmp_path: Path) -> None:
    """The run knows classes a, b and c; the joiner's files know b and c only, whose numbers would be 0 and
    1."""
    write_images(tmp_path / "all", grey(48, 8), [*"abc"] * 16)
    write_images(tmp_path / "mine", grey(16, 8), [*"bc"] * 8)
    data = {"name": "images", "options": {"folder": str(tmp_path / "all")}, "clients": 4, "partition": "iid"}
    run = run_all([{"method": "fedcap", "data": data}], tmp_path / "run")[0]
    answer = cli("customise", run.path, "--data", tmp_path / "mine", "--json")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert (said["samples"], said["tested"]) == (12, 4) and Path(
        said["model"]
    ).name == "customised-mine.safetensors"
    write_images(tmp_path / "strange", grey(16, 8), [*"bd"] * 8)
    refused(cli("customise", run.path, "--data", tmp_path / "strange"), "the run has no class 'd'")
    write_images(tmp_path / "large", grey(16, 9), [*"bc"] * 8)
    refused(
        cli("customise", run.path, "--data", tmp_path / "large"),
        "samples of shape (1, 9, 9)",
        "the run's have (1, 8, 8)",
    )
    refused(
        cli("customise", run.path, "--data", tmp_path / "mine", "--client", 1),
        "--client: a folder in --data belongs to one client",
    )


def samples(x: Any, y: list[int], names: tuple[str, ...] = (), **more: Any) -> Samples:
    return Samples(
        torch.tensor(x),
        torch.tensor(y),
        more.pop("classes", len(names) or max(y) + 1),
        len(y),
        class_names=names,
        **more,
    )


def test_samples_of_a_new_client_are_normalised_and_labelled_as_in_the_run() -> None:
    ours = samples([[1.0], [2.0], [3.0]], [0, 1, 2], ("a", "b", "c"), mean=(2.0,), std=(4.0,))
    theirs = _as_run_samples(ours, samples([[6.0], [10.0]], [1, 0], ("b", "c")), "there")
    assert theirs.y.tolist() == [2, 1] and theirs.classes == 3
    np.testing.assert_allclose(theirs.batch(torch.tensor([0, 1])).numpy(), [[1.0], [2.0]])
    with pytest.raises(DataError, match="there: label 3, the run has classes 0 to 2"):
        _as_run_samples(ours, samples([[1.0]], [3]), "there")
    numbered = samples([[1.0], [2.0], [3.0]], [0, 1, 2])
    with pytest.raises(DataError, match="there: classes have names, such as 'b', the run's are numbers"):
        _as_run_samples(numbered, samples([[1.0], [2.0]], [0, 1], ("b", "c")), "there")


def test_a_table_fits_only_its_own_files(tmp_path: Path) -> None:
    """Other rows would be standardised by themselves and mean something else to the run's models."""
    configs: dict[str, Any] = {}
    for name, unit in (("ours", 1.0), ("theirs", 1000.0)):
        columns = {"size": [unit * i for i in range(40)], "label": [i % 2 for i in range(40)]}
        write_table(tmp_path / name / "train.parquet", columns)
        data = {
            "name": "table",
            "options": {"folder": str(tmp_path / name)},
            "clients": 4,
            "partition": "iid",
        }
        configs[name] = data
        text = (
            'seed = 3\n[data]\nname = "table"\nclients = 4\npartition = "iid"\noptions = { folder ='
            f' "{tmp_path / name}" }}\n'
        )
        (tmp_path / f"{name}.toml").write_text(text)
    run = run_all([{"method": "fedcap", "model": "mlp", "data": configs["ours"]}], tmp_path / "run")[0]
    assert join(run, from_config(run, tmp_path / "ours.toml", 1)).samples > 0
    with pytest.raises(DataError, match="--data: a table's columns are fitted to the run's own train split"):
        from_config(run, tmp_path / "theirs.toml", 1)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ([], ["give the data of the new client with --data, or a client of the run with --client"]),
        (["--client", "9"], ["client 9: the run has clients 0 to 6"]),
        (["--data", "nowhere.toml"], ["config file not found: nowhere.toml"]),
        (["--data", "."], ["the run's data 'digits' is not read from files"]),
        (["--client", "1", "--out", "."], ["--out: . is a folder; name a file in it"]),
        (["--client", "1", "--out", "no/such/file"], ["--out: there is no folder no/such"]),
    ],
)
def test_refusals(options: list[str], fragments: list[str], run: Run, cli: Callable[..., Answer]) -> None:
    refused(cli("customise", run.path, *options), *fragments)


def test_a_method_without_pools_is_refused(plain: Run, cli: Callable[..., Answer]) -> None:
    refused(cli("customise", plain.path, "--client", 0), "fedavg has no result 'pooled'")
