from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import build
from holdfast.data.hashed_words import hash_word
from tests.data.folders import write_table


def load(name: str, dir: Path, **options: Any) -> Any:
    return build("source", {"name": name, **options}).load(dir)


def hashes(text: str, length: int) -> list[int]:
    words = [hash_word(word) for word in text.split()]
    return words + [0] * (length - len(words))


def test_ag_news_in_shards_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "ag_news" / "data"
    write_table(folder / "train-00000-of-00002.parquet", {"text": ["Stocks up", "A GOAL!"], "label": [2, 1]})
    write_table(folder / "train-00001-of-00002.parquet", {"text": ["", "War; peace"], "label": [3, 0]})
    write_table(folder / "test-00000-of-00001.parquet", {"text": ["chips"], "label": [3]})
    samples = load("ag-news", tmp_path)
    assert samples.words and samples.x.shape == (5, 64) and samples.train_rows == 4
    assert samples.x.tolist() == [
        hashes(text, 64) for text in ("stocks up", "a goal", "", "war peace", "chips")
    ]
    assert samples.y.tolist() == [2, 1, 3, 0, 3] and samples.class_names == (
        "World",
        "Sports",
        "Business",
        "Sci/Tech",
    )
    assert samples.batch(torch.tensor([4])).dtype == torch.int64 and samples.user is None


def test_imdb_leaves_out_the_unlabelled_reviews(tmp_path: Path) -> None:
    folder = tmp_path / "imdb" / "plain_text"
    for split, texts, labels in (
        ("train", ["bad", "good"], [0, 1]),
        ("test", ["so<br />so"], [0]),
        ("unsupervised", ["?"], [-1]),
    ):
        write_table(folder / f"{split}-00000-of-00001.parquet", {"text": texts, "label": labels})
    samples = load("imdb", tmp_path)
    assert samples.x.shape == (3, 256) and samples.y.tolist() == [0, 1, 0] and samples.classes == 2
    assert samples.x[2].tolist() == hashes("so so", 256)


def test_text_of_your_own_with_words_as_labels_and_users(tmp_path: Path) -> None:
    columns = {
        "review": ["one two three", "four"] * 5,
        "stars": ["low", "high"] * 5,
        "author": ["zoe", "adam"] * 5,
    }
    write_table(tmp_path / "mine" / "train.parquet", columns)
    options: dict[str, Any] = {
        "folder": "mine",
        "text": "review",
        "label": "stars",
        "user": "author",
        "length": 2,
    }
    head, tail = load("text", tmp_path, **options), load("text", tmp_path, **options, keep="tail")
    assert head.train_rows == 8 and head.class_names == ("high", "low")  # no test split: a fifth is set aside
    for row in range(10):
        first, last = ("four", "four") if head.y[row] == 0 else ("one two", "two three")
        assert head.x[row].tolist() == hashes(first, 2) and tail.x[row].tolist() == hashes(last, 2)
        assert head.user[row] == head.y[row]  # adam, who is 0, writes "high"
    assert torch.bincount(head.y).tolist() == [5, 5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"texts": ["a"], "label": [0]}, "no column 'text'; did you mean 'texts'"),
        ({"text": ["a"], "labels": [0]}, "no column 'label'; did you mean 'labels'"),
        ({"text": ["a", "b", None], "label": [0, 1, 1]}, "train.parquet: row 2 has no text in 'text'"),
        ({"text": [1, 2], "label": [0, 1]}, "column 'text' holds int64, not texts"),
        ({"text": ["a", "b"], "label": [0, 4]}, "row 1 has label 4 in 'label', expected whole numbers 0..3"),
        ({"text": ["a", "b"], "label": [0, None]}, "row 1 has no value in 'label'"),
        ({"text": pa.array([b"ok", b"\xff"]).view(pa.string()), "label": [0, 1]}, "not UTF-8"),
        ({"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())}, "train.parquet has no rows"),
    ],
)
def test_damaged_texts_are_a_one_line_error(tmp_path: Path, columns: dict, message: str) -> None:
    write_table(tmp_path / "ag_news" / "train.parquet", columns)
    with pytest.raises(DataError, match=message) as error:
        load("ag-news", tmp_path, test=0)
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "imdb" / "train.parquet", {"text": ["a", "b"], "label": [0, 1]})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="train.parquet cannot be read as Parquet, download it again"):
        load("imdb", tmp_path)


def test_words_are_not_normalised() -> None:
    with pytest.raises(ConfigError, match="data.options.normalise"):
        build("source", {"name": "text", "normalise": "half"}, "data.options")


def test_the_real_ag_news(real: Callable[[str], Path]) -> None:
    samples = load("ag-news", real("ag_news"))
    assert samples.x.shape == (38278, 64) and samples.train_rows == 30678
    assert torch.bincount(samples.y[:30678]).tolist() == [7594, 7732, 7700, 7652]
    assert torch.bincount(samples.y[30678:]).tolist() == [1900] * 4
    assert samples.y[30678:30686].tolist() == [2, 3, 3, 3, 3, 3, 3, 3]
    assert samples.x[30678, :7].tolist() == hashes("fears for t n pension after talks", 7)
    assert samples.x.min() == 0 and (samples.x[:, 0] > 0).all()


def test_the_real_imdb(real: Callable[[str], Path]) -> None:
    samples = load("imdb", real("imdb"))
    assert samples.x.shape == (15000, 256) and samples.train_rows == 10000
    assert (
        samples.y[:10000].tolist() == [0] * 5000 + [1] * 5000
        and samples.y[10000:].tolist() == [0] * 2500 + [1] * 2500
    )
    assert samples.x[0, :7].tolist() == hashes("airport 77 starts as a brand new", 7)
    assert (samples.x == hash_word("br")).sum() < 5  # tags are no words


def test_a_test_split_without_labels_is_replaced_by_another(tmp_path: Path) -> None:
    for split, labels in (("train", [0, 1, 0, 1, 0]), ("validation", [1, 0]), ("test", [-1, -1, -1])):
        write_table(tmp_path / "glue" / f"{split}.parquet", {"text": ["a b"] * len(labels), "label": labels})
    with pytest.raises(
        DataError,
        match="test.parquet: row 0 has label -1 .*; set data.options.test_split to a split with labels",
    ):
        load("text", tmp_path, folder="glue")
    samples = load("text", tmp_path, folder="glue", test_split="validation")
    assert samples.y.tolist() == [0, 1, 0, 1, 0, 1, 0] and samples.train_rows == 5
    shared = load("text", tmp_path, folder="glue", test_split="none")
    assert len(shared) == 5 and shared.train_rows == 4
