"""Data that only the nodes have: the bits of a federation that is dealt the same rows, and everything that is
not as declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import Message  # noqa: E402

from holdfast.core.errors import ConfigError, DataError, RunError  # noqa: E402
from holdfast.core.keys import Key  # noqa: E402
from holdfast.core.registry import build  # noqa: E402
from holdfast.data.federation import build_federation  # noqa: E402
from holdfast.data.node_data import from_folder, from_function, holding  # noqa: E402
from holdfast.data.sources.declared import Declared  # noqa: E402
from holdfast.data.split import Split  # noqa: E402
from holdfast.deploy.node import Node, federated, fingerprint  # noqa: E402
from holdfast.deploy.node_worker import NodeHome  # noqa: E402
from holdfast.deploy.project import open_node  # noqa: E402
from holdfast.deploy.server_app import serve  # noqa: E402
from holdfast.experiment.config import make_config  # noqa: E402
from holdfast.experiment.config_tables import read_config  # noqa: E402
from holdfast.experiment.loop import Experiment  # noqa: E402
from holdfast.storage.store import Store  # noqa: E402
from tests.data.folders import encode, write_table  # noqa: E402
from tests.deploy import reply_fields  # noqa: E402
from tests.deploy.local_grid import LocalGrid  # noqa: E402
from tests.deploy.worlds import same_bits, simulate, write_config  # noqa: E402

SCHEMA = 'shape = [1, 8, 8], classes = 10, samples = "bytes", mean = [0.3054], std = [0.3753], most = 2000'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def declared(**options: Any) -> Declared:
    source: Declared = build(
        "source", {"name": "declared", "shape": [2], "classes": 3, "most": 100, **options}, "data.options"
    )
    source.check()
    return source


def write_declared(
    folder: Path, method: str = "fedavg", rounds: int = 2, schema: str = SCHEMA, **sections: str
) -> Path:
    folder.mkdir(exist_ok=True)
    data = f'name = "declared"\noptions = {{ {schema} }}\n' + sections.pop("data", "")
    return write_config(folder, method, rounds, data=data, **sections)


def write_homes(folder: Path, dealt: Path) -> list[Path]:
    """A folder for each client with the very rows that it would be dealt, as images."""
    federation = build_federation(make_config(read_config(dealt)).data, Key(3).fold("data"))
    samples, homes = federation.samples, []
    for client in range(federation.clients):
        home = folder / str(client)
        for split, table in (("train", federation.train), ("test", federation.test)):
            rows, labels = table.client(client)
            pictures = [encode(image[0].numpy()) for image in samples.x[rows]]
            write_table(
                home / "mine" / f"{split}.parquet", {"image": pictures, "label": labels.tolist()}, rows=64
            )
        (home / "node.toml").write_text(f'client = {client}\ndata = "mine"\n')
        homes.append(home)
    return homes


def federate(config: Path, out: Path, homes: list[Path], **options: Any) -> LocalGrid:
    settings = {"config": str(config), "out": str(out), "deadline": 0.2, "join": 5.0}
    grid = LocalGrid(out.parent / f"{out.name}-nodes", settings, clients=len(homes), **options)
    for home, context in zip(homes, grid.nodes.values(), strict=True):
        context.node_config["home"] = str(home)
    serve(grid, settings)
    return grid


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_bits_of_clients_that_deal_themselves_the_same_rows(method: str, tmp_path: Path) -> None:
    dealt = write_config(tmp_path, method)
    simulate(dealt, tmp_path / "sim")
    federate(
        write_declared(tmp_path / "declared", method),
        tmp_path / "fed",
        write_homes(tmp_path / "homes", dealt),
    )
    runs = [Store(tmp_path / name) for name in ("sim", "fed")]
    for round in (1, 2):
        mine, theirs = (run.parts(2)[round - 1]["metrics"] for run in runs)
        assert mine == theirs and mine["accuracy"] > 0.2
        assert same_bits(runs[0].arrays(round), runs[1].arrays(round))
    states = [{k: v for k, v in run.head()[1].items() if k.startswith("server/")} for run in runs]  # type: ignore[index]
    assert same_bits(*states)


def test_the_servers_world_holds_no_samples_and_the_digest_only_the_schema(tmp_path: Path) -> None:
    def world(schema: str, **sections: str) -> str:
        config = federated(write_declared(tmp_path / "c", schema=schema, **sections))
        experiment = Experiment(config, tmp_path / "run")
        assert len(experiment.federation.samples) == 0 and experiment.federation.clients == 3
        return fingerprint(config, experiment.federation.digest, experiment.initial)

    names = ", ".join(f'"{digit}"' for digit in "0123456789")
    worlds = [
        world(SCHEMA),
        world(SCHEMA + f", class_names = [{names}]"),
        world(SCHEMA.replace("0.3054", "0.3")),
        world(SCHEMA),
    ]
    assert worlds[0] == worlds[3] and len(set(worlds)) == 3


def test_a_server_without_samples_can_pass_made_up_inputs_through_models(tmp_path: Path) -> None:
    experiment = Experiment(federated(write_declared(tmp_path / "c")), tmp_path / "run")
    probe = experiment.context().probe
    assert probe is not None and len(experiment.federation.samples) == 0
    (inputs,) = probe.inputs(Key(0), 5)
    shares = probe.log_shares(experiment.initial, None, inputs).exp()
    assert shares.shape == (5, 10) and torch.allclose(shares.sum(1), torch.ones(5, dtype=torch.float64))


def test_what_is_wrong_with_a_nodes_data_reaches_the_operator(tmp_path: Path) -> None:
    homes = write_homes(tmp_path / "homes", write_config(tmp_path, "fedavg"))
    for home in homes:
        (home / "node.toml").write_text('data = "nothing"\n')
    with pytest.raises(RunError, match="client 0: error 2: .*there is no such folder"):
        federate(write_declared(tmp_path / "declared"), tmp_path / "fed", homes)
    for home in homes:
        (home / "node.toml").write_text("")
    with pytest.raises(RunError, match="the experiment only declares its data; set data = "):
        federate(write_declared(tmp_path / "declared"), tmp_path / "fed2", homes)


def test_data_of_its_own_beside_data_that_is_dealt_is_a_mistake(tmp_path: Path) -> None:
    config = write_config(tmp_path, "fedavg")
    with pytest.raises(RunError, match="data and function are for experiments with data.name = .declared."):
        federate(config, tmp_path / "fed", write_homes(tmp_path / "homes", config))


def test_a_count_outside_the_declared_range_is_refused(tmp_path: Path) -> None:
    def lie(request: Message, reply: Message) -> Message:
        node, kind = request.metadata.dst_node_id, request.metadata.message_type
        if kind == "train" and node in (1000, 1002):
            reply_fields.put(reply.content, "count", torch.tensor(5000.0 if node == 1000 else 1.0))
        return reply

    homes = write_homes(tmp_path / "homes", write_config(tmp_path, "fedavg"))
    config = write_declared(tmp_path / "declared", rounds=1, schema=SCHEMA + ", least = 2")
    federate(config, tmp_path / "fed", homes, tamper=lie)
    assert Store(tmp_path / "fed").parts(1)[0]["refused"] == {
        "0": "count is above 2000",
        "2": "count is below 2",
    }


def test_where_data_is_divided_no_client_may_claim_more_than_the_largest_share(tmp_path: Path) -> None:
    def lie(request: Message, reply: Message) -> Message:
        if (request.metadata.message_type, request.metadata.dst_node_id) == ("train", 1001):
            reply_fields.put(reply.content, "count", torch.tensor(100_000.0))
        return reply

    config = write_config(tmp_path, "fedavg", rounds=1)
    most = int(
        build_federation(make_config(read_config(config)).data, Key(3).fold("data")).train.counts.max()
    )
    settings = {"config": str(config), "out": str(tmp_path / "fed"), "deadline": 0.2, "join": 5.0}
    serve(LocalGrid(tmp_path / "nodes", settings, tamper=lie), settings)
    assert Store(tmp_path / "fed").parts(1)[0]["refused"] == {"1": f"count is above {most}"}


def test_a_simulation_needs_samples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a simulation needs samples"):
        simulate(write_declared(tmp_path / "declared"), tmp_path / "sim")
    assert not (tmp_path / "sim").exists()
    with pytest.raises(ConfigError, match="no common test split"):
        federated(
            write_declared(tmp_path / "declared", data='pool = "train"', train='[evaluate]\ntest = "global"')
        )


def test_data_that_changes_during_a_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homes = [tmp_path / str(client) for client in range(3)]
    config = write_declared(tmp_path / "c", rounds=1, schema="shape = [2], classes = 2, most = 100")
    load = "import numpy as np\ndef load(): return "
    for home in homes:
        home.mkdir()
        (home / "node.toml").write_text('function = "mine.py:load"\n')
        (home / "mine.py").write_text(load + "np.ones((8, 2)), np.arange(8) % 2\n")
    federate(config, tmp_path / "fed", homes)
    assert "has changed" not in capsys.readouterr().err
    experiment = Experiment(federated(config), tmp_path / "run")
    world = fingerprint(experiment.config, experiment.federation.digest, experiment.initial)
    (folder,) = (tmp_path / "fed-nodes" / "node1").glob("*/1")
    (homes[1] / "mine.py").write_text(load + "np.ones((9, 2)), np.arange(9) % 2\n")
    Node(federated(config), 1, folder, world, 1, bring=NodeHome(homes[1], open_node(homes[1])).bring)
    assert "this client's data has changed since the run began" in capsys.readouterr().err


# ---- what is read, and what is refused


def test_numbers_in_columns_in_the_declared_order(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {"w": [1.0, 2.0], "label": ["no", "yes"], "v": [3, 4]})
    schema = declared(columns=["v", "w"], classes=2, class_names=["yes", "no"], mean=[1.0], std=[2.0])
    found = from_folder(tmp_path, schema)
    assert found.x.tolist() == [[3, 1], [4, 2]] and found.y.tolist() == [1, 0] and found.train_rows == 2
    assert found.batch(torch.tensor([0])).tolist() == [[1.0, 0.0]]


def test_lists_and_words(tmp_path: Path) -> None:
    write_table(tmp_path / "x" / "a.parquet", {"x": [[1.0, 2.0], [3.0, 4.0]], "label": [2, 0]})
    assert from_folder(tmp_path / "x", declared()).x.tolist() == [[1, 2], [3, 4]]
    write_table(tmp_path / "t" / "a.parquet", {"text": ["to be", "or"], "label": [2, 0]})
    found = from_folder(tmp_path / "t", declared(samples="words"))
    assert found.x.dtype == torch.int32 and bool((found.x[0] > 0).all()) and int(found.x[1, 1]) == 0


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"x": [[1.0, 2.0, 3.0]], "label": [0]}, {}, r"has shape \[3\] in 'x', but \[2\] is declared"),
        ({"x": [[1.0, float("nan")]], "label": [0]}, {}, "row 0 has a missing or infinite number"),
        ({"x": [[1.0, 2.0]], "label": [3]}, {}, r"label 3 in 'label', expected whole numbers 0..2"),
        (
            {"x": [[1.0, 2.0]], "label": ["a"]},
            {},
            "labels are words; list them in the order of their numbers in data.options.class_names",
        ),
        (
            {"x": [[1.0, 2.0]], "label": ["d"]},
            {"class_names": ["a", "b", "c"]},
            "label 'd' in 'label', which is not one of the classes",
        ),
        ({"x": [[1.0, 2.0]]}, {}, "no column 'label'"),
        ({"y": [[1.0, 2.0]], "label": [0]}, {}, "no column 'x'"),
        (
            {"v": ["a"], "w": [1], "label": [0]},
            {"columns": ["v", "w"]},
            "column 'v' holds string, not numbers",
        ),
        (
            {"v": [None], "w": [1.0], "label": [0]},
            {"columns": ["v", "w"]},
            "row 0 has a missing or infinite number",
        ),
    ],
)
def test_data_that_differs_from_its_declaration_is_one_line(
    columns: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_table(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=message) as error:
        from_folder(tmp_path, declared(**options))
    assert "\n" not in str(error.value)


def test_another_label_map_is_refused(tmp_path: Path) -> None:
    """The same numbers under other names would train without an error, and wrongly."""
    write_table(tmp_path / "a.parquet", {"x": [[1.0, 2.0]], "label": [0]}, names={"label": ["b", "a", "c"]})
    with pytest.raises(DataError, match="order differ in column 'label': found b, a, c; declared a, b, c"):
        from_folder(tmp_path, declared(class_names=["a", "b", "c"]))
    assert from_folder(tmp_path, declared(class_names=["b", "a", "c"])).class_names == ("b", "a", "c")


FUNCTIONS = """
import numpy as np, torch
from holdfast.data.samples import Samples
def good(): return np.arange(6.0).reshape(3, 2), np.array([0, 1, 2])
def tensors(): return torch.ones(2, 2), torch.tensor([2, 2])
def split(): return Samples(torch.ones(3, 2), torch.tensor([0, 1, 2]), 3, 2)
def shape(): return np.ones((3, 4)), np.zeros(3, int)
def labels(): return np.ones((3, 2)), np.array([0, 1, 3])
def negative(): return np.ones((3, 2)), np.array([0, 1, -1])
def infinite(): return np.array([[1, 2], [np.inf, 1]]), np.zeros(2, int)
def bytes_(): return np.ones((3, 2), np.uint8), np.zeros(3, int)
def empty(): return np.ones((0, 2)), np.zeros(0, int)
def one(): return np.ones((3, 2))
def floats(): return np.ones((3, 2)), np.ones(3)
def named(): return Samples(torch.ones(1, 2), torch.tensor([0]), 3, 1, class_names=("b", "a", "c"))
def fails(): raise ValueError("the database is away")
"""


def test_a_users_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    found = from_function(f"{tmp_path}/mine.py:good", declared(std=[2.0]))
    assert (
        found.x.tolist() == [[0, 1], [2, 3], [4, 5]]
        and found.x.dtype == torch.float32
        and found.std == (2.0,)
    )
    assert from_function(f"{tmp_path}/mine.py:tensors", declared()).y.tolist() == [2, 2]
    assert from_function(f"{tmp_path}/mine.py:split", declared()).train_rows == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shape", r"samples have shape \[4\], but \[2\] is declared"),
        ("labels", r"labels are 0..3, but 0..2 are declared"),
        ("negative", r"labels are -1..1, but 0..2 are declared"),
        ("infinite", "sample 1 has a number that is not finite"),
        ("bytes_", r"samples are uint8, but numbers \(float32\) are declared"),
        ("empty", "there are no samples"),
        ("one", r"returned a ndarray, expected \(x, y\) or Samples"),
        ("floats", "y must be one whole number per sample"),
        ("named", "class names or their order differ"),
        ("fails", "failed: ValueError: the database is away"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_a_function_that_gives_something_else(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    with pytest.raises(DataError, match=message):
        from_function(f"{tmp_path}/mine.py:{name}", declared(class_names=["a", "b", "c"]))


def test_a_client_holds_all_of_its_rows_and_no_other_client_any(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef load(): return np.ones((40, 2)), np.arange(40) % 3\n"
    )
    schema, key = declared(), Key(3).fold("data")
    config = write_declared(tmp_path / "c", schema="shape = [2], classes = 3, most = 100")
    world = Experiment(federated(config), tmp_path / "run").federation
    split = Split(train=0.5, validation=0.25, test=0.25)
    first, second = (
        holding(world, from_function(f"{tmp_path}/mine.py:load", schema), 1, split, schema, key)
        for _ in range(2)
    )
    assert first.train.counts.tolist() == [
        0,
        20,
        0,
    ] and first.validation.counts.tolist() == first.test.counts.tolist() == [0, 10, 0]
    assert sorted(np.concatenate([t.row for t in (first.train, first.validation, first.test)])) == list(
        range(40)
    )
    assert torch.equal(first.train.row, second.train.row) and not torch.equal(
        first.train.row, torch.arange(20)
    )
    with pytest.raises(DataError, match="client 1 has 20 training samples, but 1 to 19 are declared"):
        holding(world, from_function(f"{tmp_path}/mine.py:load", schema), 1, split, declared(most=19), key)
    much = Split(train=0.25, validation=0.25, test=0.5)
    with pytest.raises(DataError, match="client 1 has 20 test samples, but at most 19 are declared"):
        holding(world, from_function(f"{tmp_path}/mine.py:load", schema), 1, much, declared(most=19), key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": []}, "data.options.shape: expected the sides"),
        ({"classes": 0}, "set the number of classes"),
        ({"class_names": ["a"]}, "expected 3"),
        ({"samples": "bytes"}, "expected an image"),
        ({"samples": "words", "shape": [2, 2]}, "expected a text"),
        ({"columns": ["a"]}, "1 columns do not"),
        ({"least": 5, "most": 2}, "5 is more than most"),
        (
            {"most": 0},
            (
                "data.options.most: set the largest number of samples that a client may have; it bounds"
                " the weight"
            ),
        ),
    ],
)
def test_a_schema_that_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declared(**options)
