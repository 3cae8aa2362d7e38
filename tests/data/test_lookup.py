from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import build
from holdfast.data import lookup
from holdfast.data.hub import Repository, Unreachable
from holdfast.data.lookup import find_files

FILES = ("train.parquet", "test.parquet")
NOWHERE = Repository(None)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def put(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in FILES:
        (folder / file).touch()
    return folder


def found(names: list[str], dir: Path | None, repository: Repository = NOWHERE) -> Path:
    files = find_files(names, dir, repository)
    assert {split: [path.name for path in paths] for split, paths in files.items()} == {
        "train": [FILES[0]],
        "test": [FILES[1]],
    }
    return files["train"][0].parent


def test_the_four_places_are_searched_in_order(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = put(tmp_path / "hub")
    monkeypatch.setattr(lookup, "fetch", lambda repository, downloads: hub)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    monkeypatch.setenv("HOLDFAST_DATA", str(there))
    assert found(["a-set"], here) == hub
    cache = put(own_cache / "datasets" / "a-set")
    assert found(["a-set"], here) == cache
    environment = put(there / "a_set")
    assert found(["a-set"], here) == environment
    (here / "a_set").mkdir()  # is there, but holds nothing
    assert found(["a-set"], here) == environment
    dir = put(here / "a-set")
    assert found(["a-set"], here) == dir


def test_a_missing_data_dir_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's data.dir may be another machine's, where the data lies elsewhere, so that is only said."""
    here = put(tmp_path / "here" / "a-set")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "here"))
    with pytest.warns(
        UserWarning, match=f"data.dir: there is no folder {tmp_path / 'gone'}; searching the other places"
    ):
        assert found(["a-set"], tmp_path / "gone") == here
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "gone"))
    assert found(["a-set"], tmp_path / "here") == here, "it is not looked at"
    with pytest.raises(
        DataError, match=f"HOLDFAST_DATA: there is no folder {tmp_path / 'gone'}; correct it or unset it"
    ):
        find_files(["another-set"], tmp_path / "here", NOWHERE)


def test_a_folder_is_found_under_all_its_names(tmp_path: Path) -> None:
    folder = put(tmp_path / "fashion_mnist")
    assert found(["fashion-mnist"], tmp_path) == folder
    assert found(["clothes", "fashion-mnist"], tmp_path) == folder
    assert found(["fashion-mnist"], folder) == folder  # pointed at the dataset instead of at what holds it


def test_a_folder_given_as_a_path_is_only_searched_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = put(tmp_path / "own")
    assert found([str(own)], None) == own
    monkeypatch.chdir(tmp_path)
    assert found(["./own"], None) == Path("own")
    with pytest.raises(
        DataError,
        match=(
            r"data.options.folder /no/such: there is no such folder; expected train.parquet and test.parquet"
        ),
    ):
        found(["/no/such"], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder has no train split"):
        found(["./empty"], None)


def test_an_unknown_home_and_a_too_long_name_are_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match="data.options.folder: ~nobody-at-all/x begins with the home directory of an unknown user",
    ):
        find_files(["~nobody-at-all/x"], tmp_path, NOWHERE)
    for name in ("x" * 5000, "/" + "x" * 5000):
        with pytest.raises(DataError, match="no folder x|there is no such folder"):
            find_files([name], tmp_path, NOWHERE)
    monkeypatch.setenv("HOLDFAST_DATA", "~nobody-at-all/x")
    with pytest.raises(ConfigError, match="HOLDFAST_DATA: ~nobody-at-all/x begins"):
        find_files(["a"], tmp_path, NOWHERE)


def test_one_error_names_all_four_places_and_the_layout(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "fashion_mnist").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "empty"))
    with pytest.raises(DataError) as error:
        build("source", "fashion-mnist").load(tmp_path / "data")
    text = str(error.value)
    assert text.startswith("data 'fashion-mnist' not found: searched ") and "\n" not in text
    assert f"data.dir ({tmp_path / 'data'}: no train split in fashion_mnist/)" in text
    assert f"HOLDFAST_DATA ({tmp_path / 'empty'}: no folder fashion_mnist/)" in text
    assert f"the cache ({own_cache / 'datasets'}: no such folder)" in text
    assert "the Hub (HF_HUB_OFFLINE is set)" in text
    assert "fashion_mnist/ with train.parquet and test.parquet, or train-00000-of-00002.parquet" in text


def test_the_error_names_places_that_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> Path:
        raise Unreachable("no answer")

    monkeypatch.setattr(lookup, "fetch", none)
    with pytest.raises(
        DataError,
        match=r"data.dir \(not set\), HOLDFAST_DATA \(not set\), the cache \(.*\), the Hub \(no answer\)",
    ):
        find_files(["a"], None, NOWHERE)


def test_several_subsets_are_an_error(tmp_path: Path) -> None:
    put(tmp_path / "set" / "x"), put(tmp_path / "set" / "y")
    with pytest.raises(DataError, match="several subsets; set data.options.subset to one of: x, y"):
        find_files(["set"], tmp_path, NOWHERE)
    assert found(["set"], tmp_path, Repository(None, "y")) == tmp_path / "set" / "y"
