"""The config contract: every field of design.md, --set, and mistakes said in one line with the path and the
nearest name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.experiment.config import Config, make_config, parse_memory
from holdfast.experiment.config_tables import assign, merge, parse_value, read_config
from holdfast.experiment.object_names import unnamed
from holdfast.methods.ditto import Ditto
from holdfast.models.mlp import Mlp
from holdfast.models.own_module import Model
from holdfast.sweeps.grid import expand

# design.md's example with parts that exist already
CONTRACT = """
seed = 0
[data]
name = "digits"
clients = 20
partition = { name = "pathological", classes_per_client = 2, form = "blocks", samples_per_client = 40 }
split = { train = 0.75, test = 0.25 }
[model]
name = "mlp"
[method]
name = "ditto"
lam = 0.1
[aggregator]
name = "mean"
wrap = []
[train]
rounds = 100
local_epochs = 5
batch_size = 10
lr = 0.01
participation = 1.0
[evaluate]
every = 1
clients = "all"
models = ["global", "customised", "personal"]
unselected = "keep_own"
[sweep]
"method.name" = ["fedavg", "ditto", "local"]
seed = [0, 1, 2]
[[sweep.override]]
when = { "method.name" = "ditto", "seed" = 1 }
set = { "method.lam" = 1.0 }
"""


def test_the_contract_of_the_design_parses(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONTRACT)
    table = read_config(tmp_path / "config.toml")
    cells = expand(table)
    assert len(cells) == 9
    table.pop("sweep")
    config = make_config(table)
    assert (
        config.data.clients == 20
        and config.train.rounds == 100
        and config.evaluate.models == ("global", "customised", "personal")
    )
    parts = config.parts()
    assert (parts.method.name, parts.method.settings()["lam"], parts.aggregator.name) == (
        "ditto",
        0.1,
        "mean",
    )


def test_an_empty_config_is_valid() -> None:
    parts = make_config(read_config(None)).parts()
    assert parts.method.name == "fedcap" and parts.attack is None and make_config({}).data.name == "digits"


def test_a_config_survives_the_manifest() -> None:
    """Every field, as JSON and back; objects that a name finds become tables."""
    config = make_config(
        {
            "seed": 7,
            "method": Ditto(lam=0.3),
            "model": {"name": "mlp", "hidden": [8, 4]},
            "aggregator": {"name": "mean", "f": 0.2},
            "data": {
                "split": {"train": 0.5, "validation": 0.25, "test": 0.25},
                "partition": "iid",
                "root": 10,
            },
            "train": {
                "availability": {"3": [[1, 5]]},
                "augment": {"flip": 0.5},
                "norm_cap": 2.5,
                "local_steps": 3,
                "lr": 0.1 + 0.2,
            },
            "evaluate": {"targets": [0.5, 0.9], "clients": "cohort"},
            "engine": {"plan": "vmap", "memory": "1.5 GiB"},
        }
    )
    table = json.loads(json.dumps(config.plain()))
    again = make_config(table)
    assert table["method"] == {"name": "ditto", "lam": 0.3} and not unnamed(table)
    assert (
        again.plain() == config.plain() and again.train == config.train and again.evaluate == config.evaluate
    )
    assert again.parts().method == config.parts().method


def test_objects_without_a_name_are_found_again() -> None:
    class Mine(Ditto):
        """Not registered."""

    config = make_config(
        {
            "method": Mine(),
            "model": Model(nn.Linear(64, 10), head=None),
            "train": {"loss": lambda net, batch: batch.x},
        }
    )
    assert unnamed(config.plain()) == ["model", "method", "train.loss"]
    assert config.parts().method is config.method


@pytest.mark.parametrize(
    "table, words",
    [
        ({"trian": {}}, ["unknown key 'trian'", "did you mean 'train'?"]),
        ({"train": {"round": 3}}, ["unknown key 'train.round'", "did you mean 'rounds'?"]),
        ({"train": {"augment": {"crp": 3}}}, ["unknown key 'train.augment.crp'", "'crop'"]),
        ({"data": {"client": 3}}, ["unknown key 'data.client'", "'clients'"]),
        ({"data": {"split": {"trian": 0.5}}}, ["unknown key 'data.split.trian'", "'train'"]),
        (
            {"data": {"partition": {"name": "iid", "sample_per_client": 3}}},
            ["unknown key 'data.partition.sample_per_client'", "samples_per"],
        ),
        ({"data": {"partition": "dirichlett"}}, ["unknown partition 'dirichlett'", "'dirichlet'"]),
        (
            {"data": {"options": {"normalize": "half"}}},
            ["unknown key 'data.options.normalize'", "'normalise'"],
        ),
        ({"evaluate": {"client": "all"}}, ["unknown key 'evaluate.client'", "'clients'"]),
        ({"engine": {"divice": "cpu"}}, ["unknown key 'engine.divice'", "'device'"]),
        ({"method": {"name": "ditto", "lamb": 3}}, ["unknown key 'method.lamb'", "'lam'"]),
        ({"method": "fedavgg"}, ["unknown method 'fedavgg'", "'fedavg'"]),
        ({"model": {"name": "mlp", "hiden": 3}}, ["unknown key 'model.hiden'", "'hidden'"]),
        (
            {"aggregator": {"name": "mean", "weight": "uniform"}},
            ["unknown key 'aggregator.weight'", "'weights'"],
        ),
        ({"aggregator": {"name": "mean", "wrap": [{"name": "nothing"}]}}, ["unknown wrapper 'nothing'"]),
        ({"aggregator": {"name": "mean", "wrap": "nothing"}}, ["aggregator.wrap", "list"]),
        ({"detectors": ["nothing"]}, ["unknown detector 'nothing'"]),
        ({"attack": {"name": "nothing"}}, ["unknown attack 'nothing'"]),
        ({"attack": {"fraction": 0.3}}, ["attack: needs a name"]),
        ({"train": {"loss": "cros-entropy"}}, ["unknown loss", "'cross-entropy'"]),
        (
            {"train": {"loss": {"name": "cross-entropy", "smoothing": 1}}},
            ["unknown key 'train.loss.smoothing'", "'label_smoothing'"],
        ),
        # wrong types
        ({"train": 5}, ["train: ", "(got 5)"]),
        ({"train": {"rounds": "many"}}, ["train.rounds", "integer", "'many'"]),
        ({"train": {"rounds": 2.5}}, ["train.rounds", "2.5"]),
        ({"train": {"lr": "fast"}}, ["train.lr", "'fast'"]),
        ({"seed": "x"}, ["seed", "'x'"]),
        ({"method": 5}, ["method: ", "by name", "not 5"]),
        ({"method": ["ditto"]}, ["method: ", "by name"]),
        ({"method": Ditto}, ["method: ", "as an object"]),
        ({"method": {"name": 5}}, ["method: needs a name"]),
        ({"method": {"name": "ditto", "lam": "much"}}, ["method.lam", "'much'"]),
        ({"aggregator": 5}, ["aggregator: "]),
        ({"aggregator": Ditto()}, ["aggregator: ", "of kind method"]),
        ({"model": Mlp}, ["model: ", "as an object"]),
        ({"detectors": "norm"}, ["detectors: "]),
        ({"train": {"availability": [1]}}, ["train.availability: ", "a probability"]),
        ({"data": {"partition": 5}}, ["data.partition: ", "a name"]),
        ({"evaluate": {"models": ["globl"]}}, ["evaluate.models.0", "'global'"]),
        ({"engine": {"plan": "fast"}}, ["engine.plan", "'loop'"]),
        ({"engine": {"memory": "lots"}}, ["engine.memory", "2GB"]),
        # out of range
        ({"data": {"clients": 0}}, ["data.clients", "(got 0)"]),
        ({"train": {"rounds": 0}}, ["train.rounds"]),
        ({"train": {"lr": -0.1}}, ["train.lr", "-0.1"]),
        ({"train": {"lr": float("inf")}}, ["train.lr", "finite"]),
        ({"train": {"participation": 0}}, ["train.participation"]),
        ({"train": {"participation": 1.5}}, ["train.participation"]),
        ({"train": {"dropout": 2}}, ["train.dropout"]),
        ({"train": {"momentum": 1}}, ["train.momentum"]),
        ({"data": {"split": {"train": 0.9}}}, ["data.split", "1.15"]),
        ({"data": {"held_out": 20}}, ["held_out"]),
        (
            {"evaluate": {"metrics": ["f1"]}},
            ["evaluate.metrics.0", "'macro_f1', 'balanced_accuracy' or 'auc'", "'f1'"],
        ),
        ({"evaluate": {"metrics": "auc"}}, ["evaluate.metrics"]),
        ({"evaluate": {"targets": [80]}}, ["evaluate.targets.0", "80"]),
        ({"method": {"name": "ditto", "lam": -1}}, ["method.lam"]),
        # parts that do not go together
        ({"method": "local", "aggregator": "mean"}, ["does not aggregate updates"]),
        ({"method": "local", "evaluate": {"models": ["global"]}}, ["evaluate.models", "personal"]),
        ({"evaluate": {"test": "global"}}, ["data.pool"]),
        ({"evaluate": {"clients": "held-out"}}, ["data.held_out"]),
    ],
)
def test_a_mistake_is_an_error_of_one_line(table: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(table).parts()
    text = str(error.value)
    assert "\n" not in text and len(text) < 300
    assert all(word in text for word in words), text


def test_an_object_of_the_wrong_kind_is_refused() -> None:
    from holdfast.aggregators.base import Aggregator

    class Rule(Aggregator):
        """Not registered, so only its class says what it is."""

    with pytest.raises(ConfigError, match="method: "):
        make_config({"method": Rule()}).parts()


# ---- --set


@pytest.mark.parametrize(
    "text, value",
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("ditto", "ditto"),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ("", ""),
        ('{ name = "iid" }', {"name": "iid"}),
        ("multi-krum", "multi-krum"),
        ("runs/a b", "runs/a b"),
        ("a=b", "a=b"),
    ],
)
def test_values_need_no_quotes(text: str, value: Any) -> None:
    assert parse_value(text) == value


def changed(base: dict[str, Any], *changes: str) -> dict[str, Any]:
    table = dict(base)
    for change in changes:
        key, _, text = change.partition("=")
        assign(table, key, parse_value(text))
    return table


def test_set() -> None:
    assert changed({}, "train.lr=0.1", "seed=3") == {"train": {"lr": 0.1}, "seed": 3}
    assert changed({"method": "ditto"}, "method.lam=0.5") == {"method": {"name": "ditto", "lam": 0.5}}
    assert changed({}, "method=ditto", "method.lam=0.5") == {"method": {"name": "ditto", "lam": 0.5}}
    assert changed({}, "data.partition.beta=0.5") == {
        "data": {"partition": {"name": "pathological", "beta": 0.5}}
    }
    assert changed({"method": {"name": "ditto", "lam": 1}}, "method.name=fedprox") == {
        "method": {"name": "fedprox"}
    }, "other settings"
    assert changed({"method": {"name": "ditto", "lam": 1}}, "method.name=ditto") == {
        "method": {"name": "ditto", "lam": 1}
    }
    assert changed(
        {"data": {"partition": {"name": "iid", "samples_per_client": 3}}}, "data.partition.name=dirichlet"
    )["data"] == {"partition": {"name": "dirichlet"}}
    assert changed({"data": {"name": "digits", "clients": 3}}, "data.name=mnist")["data"] == {
        "name": "mnist",
        "clients": 3,
    }
    base = {"train": {"lr": 1}}
    changed(base, "train.lr=2")
    assert base == {"train": {"lr": 1}}, "the given tables are not changed"
    with pytest.raises(ConfigError, match="'seed' is not a section"):
        changed({"seed": 3}, "seed.x=1")


def test_sections_are_laid_over_a_config_key_by_key() -> None:
    base: dict[str, Any] = {
        "seed": 3,
        "train": {"rounds": 9, "lr": 0.5, "augment": {"crop": 2}},
        "method": {"name": "ditto", "lam": 0.7},
        "aggregator": "krum",
        "attack": {"name": "ipm", "eps": 2.0, "fraction": 0.4},
        "data": {"clients": 4, "name": "mnist", "options": {"repo": "a/b"}},
    }
    before = copy.deepcopy(base)
    assert merge(base, {"train": {"rounds": 2, "augment": {"flip": True}}})["train"] == {
        "rounds": 2,
        "lr": 0.5,
        "augment": {"crop": 2, "flip": True},
    }
    assert merge(base, {"method": {"lam": 0.1}})["method"] == {"name": "ditto", "lam": 0.1}
    assert merge(base, {"method": {"mu": 0.1, "name": "fedprox"}})["method"] == {
        "name": "fedprox",
        "mu": 0.1,
    }, "another part's settings"
    assert merge(base, {"attack": {"name": "lie"}})["attack"] == {
        "name": "lie",
        "fraction": 0.4,
    }, "the same attackers, as with --set"
    assert merge(base, {"aggregator": {"f": 0.1}})["aggregator"] == {"name": "krum", "f": 0.1}
    assert merge(base, {"data": {"name": "mnist"}})["data"] == base["data"]
    assert merge(base, {"data": {"name": "cifar10"}})["data"] == {
        "clients": 4,
        "name": "cifar10",
    }, "options are the dataset's own"
    assert merge(base, {"method": "fedavg", "attack": None}) == {
        **base,
        "method": {"name": "fedavg"},
        "attack": None,
    }
    assert merge(base, {"attack": "lie"})["attack"] == {
        "name": "lie",
        "fraction": 0.4,
    }, "a name alone is as a table with that name"
    assert merge(base, {"method": "ditto"})["method"] == base["method"]
    assert merge(
        {"sweep": {"seed": [0], "method": {"name": ["a"], "lam": [1]}}},
        {"sweep": {"method": {"name": ["b"]}}},
    )["sweep"] == {"seed": [0], "method": {"name": ["b"], "lam": [1]}}
    assert base == before, "the given tables are not changed"
    assert merge({"method": Ditto()}, {"method": {"name": "fedavg"}})["method"] == {"name": "fedavg"}
    with pytest.raises(ConfigError, match="method: the config has a Python object there"):
        merge({"method": Ditto()}, {"method": {"lam": 0.1}})


def test_set_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[method]\nname = "fedprox"\nmu = 0.5\n[train]\nrounds = 9\n')
    assert read_config(file, ["train.rounds=3"])["train"] == {"rounds": 3}
    # whatever the order, a part is named before it is set: no setting that was asked for is lost
    for order in (["method.lam=0.7", "method.name=ditto"], ["method.name=ditto", "method.lam=0.7"]):
        assert read_config(file, order)["method"] == {"name": "ditto", "lam": 0.7}
    assert read_config(None, ["train.lr=1", "train.lr=2"])["train"] == {"lr": 2}, "the last word counts"
    for wrong in ("rounds", "=3", " = 3"):
        with pytest.raises(ConfigError, match="key=value"):
            read_config(None, [wrong])


@pytest.mark.parametrize(
    "content, words", [(None, "not found"), (b"a = [", "not valid TOML"), (b"\xff", "cannot be read")]
)
def test_a_file_that_is_not_a_config_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "c.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_config(file)
    assert words in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_is_refused_as_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder, not a config file; name the TOML file in it"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "text, amount",
    [("2GB", 2 * 10**9), ("500 MB", 5 * 10**8), ("1.5GiB", 3 * 2**29), ("64kib", 65536), ("7b", 7)],
)
def test_amounts_of_memory(text: str, amount: int) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize("text", ["", "GB", "2", "-1GB", "0MB", "two GB", "1TBB", "nanGB", "infGB"])
def test_not_amounts_of_memory(text: str) -> None:
    with pytest.raises(ConfigError, match="engine.memory"):
        parse_memory(text)


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        Config().seed = 3  # type: ignore[misc]
