"""The Hub, replaced by a small server on this machine: no test uses the network."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import DataError
from holdfast.core.registry import build
from holdfast.data.hub import WHOLE, Repository, Unreachable, fetch
from tests.data.folders import grey, wrapped, write_table
from tests.data.hub_server import Hub, serving

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
CONVERTED = "refs/convert/parquet"


def digits(tmp_path: Path, count: int) -> bytes:
    return write_table(
        tmp_path / "one.parquet", {"image": wrapped(grey(count)), "label": [i % 10 for i in range(count)]}
    ).read_bytes()


def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_TOKEN", "HF_HUB_OFFLINE", "HOLDFAST_DATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", False
    )  # read when it is first imported, maybe by another test


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    six, two, three = (digits(tmp_path, count) for count in (6, 2, 3))
    datasets = {
        "ylecun/mnist": {
            "main": {
                "README.md": b"words",
                "mnist/train-00000-of-00002.parquet": six,
                "mnist/train-00001-of-00002.parquet": three,
                "mnist/test-00000-of-00001.parquet": two,
                "mnist/extra-00000-of-00001.parquet": six,
            },
        },
        "me/script": {
            "main": {"load.py": b"code"},
            CONVERTED: {"default/train/0000.parquet": six, "default/validation/0000.parquet": two},
        },
        "me/subsets": {"main": {"a/train.parquet": six, "b/train.parquet": two}},
        "me/glue": {"main": {"train.parquet": six, "validation.parquet": three, "test.parquet": two}},
        "me/csv": {"main": {"train.csv": b"1,2"}},
        "me/secret": {"main": {"train.parquet": six}},
    }
    online(monkeypatch)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serving(datasets) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.gated.add("me/secret")
        yield hub


def test_a_known_set_comes_from_the_hub_once(
    hub: Hub, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_hidden")
    samples = build("source", "mnist").load(None)
    assert (
        len(samples) == 11
        and samples.train_rows == 9
        and samples.y.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1]
    )
    wanted = [
        "mnist/test-00000-of-00001.parquet",
        "mnist/train-00000-of-00002.parquet",
        "mnist/train-00001-of-00002.parquet",
    ]
    assert hub.fetched() == wanted  # no other file, and each once
    assert any(token == "Bearer hf_hidden" for _, _, token in hub.asked)
    assert not [file for file in own_cache.rglob("*") if file.is_file() and b"hf_hidden" in file.read_bytes()]
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(build("source", "mnist").load(None)) == 11 and not hub.asked


def test_other_formats_come_from_the_hubs_parquet_conversion(hub: Hub) -> None:
    samples = build("source", {"name": "images", "repo": "me/script"}).load(None)
    assert len(samples) == 8 and samples.train_rows == 6  # what is held back for validation tests
    assert hub.fetched() == ["default/train/0000.parquet", "default/validation/0000.parquet"]


def test_a_subset_must_be_chosen_and_has_a_folder_of_its_own(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match="me/subsets on the Hub: there are several subsets; set data.options.subset to one of: a, b",
    ):
        fetch(Repository("me/subsets"), tmp_path / "to")
    a, b = (fetch(Repository("me/subsets", subset), tmp_path / "to") for subset in ("a", "b"))
    assert a.name == "me--subsets--a" and b.name == "me--subsets--b"
    assert hub.fetched() == ["a/train.parquet", "b/train.parquet"]


def test_a_given_test_split_is_the_one_downloaded(hub: Hub, own_cache: Path) -> None:
    samples = build("source", {"name": "images", "repo": "me/glue", "test_split": "validation"}).load(None)
    assert len(samples) == 9 and samples.train_rows == 6
    assert hub.fetched() == ["train.parquet", "validation.parquet"]
    assert (
        len(build("source", {"name": "images", "repo": "me/glue"}).load(None)) == 8
    )  # in a folder of its own
    assert sorted(path.name for path in (own_cache / "datasets").iterdir()) == [
        "me--glue",
        "me--glue--test=validation",
    ]
    with pytest.raises(
        DataError,
        match="me/glue on the Hub: there is no split 'tset' for data.options.test_split; did you mean"
        " 'test'?",
    ):
        build("source", {"name": "images", "repo": "me/glue", "test_split": "tset"}).load(None)


def test_an_interrupted_download_is_not_used_and_continues(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist = Repository("ylecun/mnist")
    import huggingface_hub

    def interrupted(*args: Any, local_dir: Path, **rest: Any) -> None:
        huggingface_hub.hf_hub_download(
            "ylecun/mnist",
            "mnist/train-00000-of-00002.parquet",
            repo_type="dataset",
            local_dir=local_dir,
            endpoint=hub.url,
        )
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(mnist, tmp_path / "to")
    assert (tmp_path / "to/ylecun--mnist/mnist/train-00000-of-00002.parquet").is_file()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Unreachable, match="HF_HUB_OFFLINE is set"):
        fetch(mnist, tmp_path / "to")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.asked.clear()
    target = fetch(mnist, tmp_path / "to")
    assert (target / WHOLE).is_file() and "mnist/train-00000-of-00002.parquet" not in hub.fetched()
    (target / "mnist/test-00000-of-00001.parquet").unlink()  # a file that was deleted afterwards is noticed
    fetch(mnist, tmp_path / "to")
    assert (target / "mnist/test-00000-of-00001.parquet").is_file()


@pytest.mark.parametrize(
    ("repo", "revision", "reason"),
    [
        ("me/nothing", None, "there is no dataset me/nothing; if it is private, set HF_TOKEN"),
        ("me/secret", None, "me/secret requires you to accept its terms on its page; then set HF_TOKEN"),
        ("me/csv", None, "me/csv has no Parquet files for a train split"),
        ("ylecun/mnist", "v9", "ylecun/mnist has no revision v9"),
        ("not an id", None, "'not an id' is not a dataset id, expected OWNER/NAME"),
        (None, None, "data.options.repo is not set"),
    ],
)
def test_errors_of_the_hub_give_their_reason(
    hub: Hub, tmp_path: Path, repo: str | None, revision: str | None, reason: str
) -> None:
    with pytest.raises(Unreachable) as error:
        fetch(Repository(repo, revision=revision), tmp_path / "to")
    assert str(error.value) == reason


def test_an_unreachable_hub_gives_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    begun = time.monotonic()
    with pytest.raises(Unreachable, match="^no answer: .*refused") as error:
        fetch(Repository("me/any"), tmp_path / "to")
    assert time.monotonic() - begun < 10 and "\n" not in str(error.value)


def test_a_missing_library_or_folder_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Unreachable, match="pip install huggingface_hub"):
        fetch(Repository("me/any"), tmp_path)
    with pytest.raises(Unreachable, match="set HOLDFAST_CACHE"):
        fetch(Repository("me/any"), None)


def test_an_interrupted_transfer_is_a_one_line_error(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library waits before it tries again
    hub.broken.add("mnist/test-00000-of-00001.parquet")
    with pytest.raises(Unreachable) as error:
        fetch(Repository("ylecun/mnist"), tmp_path / "to")
    assert "\n" not in str(error.value) and not (tmp_path / "to/ylecun--mnist" / WHOLE).exists()
    hub.broken.clear()
    assert (fetch(Repository("ylecun/mnist"), tmp_path / "to") / WHOLE).is_file()
