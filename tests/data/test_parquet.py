from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.core.errors import DataError
from holdfast.data.labels import read_users
from holdfast.data.layout import arrange, choose_test
from holdfast.data.parquet import ParquetRows, find_splits, read_labels
from tests.data.folders import write_table

# ---- which files belong to which split ----


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("names", "subset", "splits"),
    [
        (["train.parquet", "test.parquet"], None, {"train": ["train.parquet"], "test": ["test.parquet"]}),
        (
            ["data/train-00000-of-00001-a1b2.parquet", "data/valid-00000-of-00001-ff.parquet"],
            None,
            {
                "train": ["data/train-00000-of-00001-a1b2.parquet"],
                "validation": ["data/valid-00000-of-00001-ff.parquet"],
            },
        ),
        (
            ["x/train-00000-of-00001.parquet", "y/train-00000-of-00001.parquet"],
            "y",
            {"train": ["y/train-00000-of-00001.parquet"]},
        ),
        (
            ["plain_text/train-00000-of-00001.parquet"],
            None,
            {"train": ["plain_text/train-00000-of-00001.parquet"]},
        ),
        (
            ["c/train/0000.parquet", "c/train/0001.parquet", "c/test/0000.parquet"],
            None,
            {"train": ["c/train/0000.parquet", "c/train/0001.parquet"], "test": ["c/test/0000.parquet"]},
        ),
        (["default/train/0.parquet", "other/train/0.parquet"], None, {"train": ["default/train/0.parquet"]}),
        (
            ["train.parquet", "more/train.parquet"],
            None,
            {"train": ["train.parquet"]},
        ),  # the folder's own before a subset's
        (
            ["train.parquet"],
            "cropped_digits",
            {"train": ["train.parquet"]},
        ),  # a folder that holds only one subset
        (
            ["b10.parquet", "b9.parquet"],
            None,
            {"train": ["b9.parquet", "b10.parquet"]},
        ),  # no split is named: all is train
        (
            ["train.parquet", "notes.parquet", ".cache/train.parquet", "train.csv"],
            None,
            {"train": ["train.parquet"]},
        ),
        (["train.csv"], None, {}),
        (["Train.parquet", "Test.parquet"], None, {"train": ["Train.parquet"], "test": ["Test.parquet"]}),
        (
            ["my-train.parquet", "my-test.parquet"],
            None,
            {"train": ["my-train.parquet"], "test": ["my-test.parquet"]},
        ),
        (
            ["train_0.parquet", "train_1.parquet", "test_0.parquet"],
            None,
            {"train": ["train_0.parquet", "train_1.parquet"], "test": ["test_0.parquet"]},
        ),
        (["train.parquet", "test_1.parquet"], None, {"train": ["train.parquet"], "test": ["test_1.parquet"]}),
        (
            ["train-0.parquet", "eval-0.parquet"],
            None,
            {"train": ["train-0.parquet"], "test": ["eval-0.parquet"]},
        ),
        (
            ["data/train_part_10.parquet", "data/train_part_9.parquet", "data/dev2.parquet"],
            None,
            {
                "train": ["data/train_part_9.parquet", "data/train_part_10.parquet"],
                "validation": ["data/dev2.parquet"],
            },
        ),
        (
            ["train-00000-of-00001.snappy.parquet", "test-00000-of-00001.snappy.parquet"],
            None,
            {
                "train": ["train-00000-of-00001.snappy.parquet"],
                "test": ["test-00000-of-00001.snappy.parquet"],
            },
        ),
        (
            ["my_train-00000-of-00001.parquet", "my_test-00000-of-00001.parquet"],
            None,
            {"train": ["my_train-00000-of-00001.parquet"], "test": ["my_test-00000-of-00001.parquet"]},
        ),
        (
            ["train.parquet/part-0.parquet", "test.parquet/part-0.parquet"],
            None,
            {"train": ["train.parquet/part-0.parquet"], "test": ["test.parquet/part-0.parquet"]},
        ),
        (
            ["train/part-00000-of-00001.parquet", "test/a.parquet"],
            None,
            {"train": ["train/part-00000-of-00001.parquet"], "test": ["test/a.parquet"]},
        ),
        (
            ["c/partial-train/0000.parquet", "c/validation_matched/0000.parquet"],
            None,  # a split of the Hub is not two
            {
                "train": ["c/partial-train/0000.parquet"],
                "validation_matched": ["c/validation_matched/0000.parquet"],
            },
        ),
        (
            ["train-00000-of-00001.parquet", "test-00000-of-00001.parquet", "eval-00000-of-00001.parquet"],
            None,
            {split: [f"{split}-00000-of-00001.parquet"] for split in ("train", "test", "eval")},
        ),
        (
            ["trains.parquet", "testament.parquet"],
            None,
            {"train": ["testament.parquet", "trains.parquet"]},
        ),  # only whole words count
        (
            ["train_test.parquet", "train.parquet"],
            None,
            {"train_test": ["train_test.parquet"], "train": ["train.parquet"]},
        ),
        (
            ["notes.parquet", "c/train/0.parquet"],
            None,
            {"train": ["c/train/0.parquet"]},
        ),  # the stray file is not the data
        (["a/x.parquet", "b/train.parquet"], "a", {"train": ["a/x.parquet"]}),
    ],
)
def test_splits_are_found_in_all_layouts(
    tmp_path: Path, names: list[str], subset: str | None, splits: dict[str, list[str]]
) -> None:
    found = find_splits(touch(tmp_path, *names), subset)
    assert found == {split: [tmp_path / file for file in files] for split, files in splits.items()}


def test_links_are_followed_without_loops(tmp_path: Path) -> None:
    real, here = touch(tmp_path / "real", "train.parquet", "sub/test.parquet"), tmp_path / "here"
    here.mkdir()
    (here / "data").symlink_to(real)
    (real / "sub" / "back").symlink_to(real)
    assert find_splits(here) == {"train": [here / "data/train.parquet"]}
    assert find_splits(here, "sub") == {"test": [here / "data/sub/test.parquet"]}


def test_a_broken_link_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    touch(tmp_path, "train.parquet")
    (tmp_path / "test.parquet").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="test.parquet cannot be read"):
        _ = ParquetRows(find_splits(tmp_path)["test"]).count


@pytest.mark.parametrize(
    ("splits", "wanted", "chosen"),
    [
        ("train test validation", None, "test"),
        ("train validation", None, "validation"),
        ("train extra", None, None),
        ("train validation_matched", None, "validation_matched"),
        ("train test validation", "validation", "validation"),
        ("train test validation", "dev", "validation"),
        ("train test extra", "extra", "extra"),
        ("train test", "none", None),
        ("train test_matched test_mismatched", "test_matched", "test_matched"),
    ],
)
def test_the_choice_of_the_test_split(splits: str, wanted: str | None, chosen: str | None) -> None:
    assert choose_test(dict.fromkeys(splits.split()), wanted, "here") == chosen


def test_splits_that_cannot_be_tested_on_are_refused() -> None:
    with pytest.raises(
        DataError,
        match="here: there is no split 'valdation' for data.options.test_split; did you mean 'validation'?",
    ):
        choose_test({"train": 1, "validation": 1}, "valdation", "here")
    with pytest.raises(DataError, match="'train' is the split to train on"):
        choose_test({"train": 1}, "train", "here")
    with pytest.raises(
        DataError,
        match="several splits could be for testing; set data.options.test_split to one of: test_a,"
        " test_b, none",
    ):
        choose_test({"train": 1, "test_a": 1, "test_b": 1}, None, "here")


def test_more_than_ten_files_in_numeric_order() -> None:
    names = [f"train-{i:05d}-of-00012.parquet" for i in range(12)]
    assert [str(path) for path in arrange(reversed(names), None, "here")["train"]] == names
    assert [path.name for path in arrange([f"train/{i}.parquet" for i in range(12)], None, "here")["train"]][
        9:
    ] == [
        "9.parquet",
        "10.parquet",
        "11.parquet",
    ]


@pytest.mark.parametrize(
    ("names", "subset", "message"),
    [
        (
            ["x/train.parquet", "y/train.parquet"],
            None,
            "here: there are several subsets; set data.options.subset to one of: x, y",
        ),
        (["x/train.parquet", "y/train.parquet"], "z", "here: there is no subset 'z'; known: x, y"),
        (
            ["cropped_digits/train.parquet"],
            "croped_digits",
            "no subset 'croped_digits'; did you mean 'cropped_digits'?",
        ),
        (
            ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"],
            None,
            "has 2 of 3 files, number 1 is missing; download it again",
        ),
        (
            ["train.parquet", "data/train-00000-of-00001.parquet"],
            None,
            "split 'train' exists more than once",
        ),
        (
            ["train-00000-of-00001-aa.parquet", "train-00000-of-00001-bb.parquet"],
            None,
            "files with the same number",
        ),
    ],
)
def test_ambiguous_folders_are_refused(names: list[str], subset: str | None, message: str) -> None:
    with pytest.raises(DataError) as error:
        arrange(names, subset, "here")
    assert message in str(error.value) and "\n" not in str(error.value)


# ---- several files as one ----


def two_files(folder: Path) -> ParquetRows:
    first = write_table(
        folder / "train-00000-of-00002.parquet", {"a": [1, 2, 3], "b": ["x", "y", "z"]}, {"a": ["nil", "one"]}
    )
    return ParquetRows(
        [first, write_table(folder / "train-00001-of-00002.parquet", {"a": [4, 5], "b": ["v", "w"]})]
    )


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    rows = two_files(tmp_path)
    assert (
        rows.count == 5
        and rows.names == ("a", "b")
        and rows.class_names("a") == ("nil", "one")
        and rows.class_names("b") == ()
    )
    assert rows.column("a").to_pylist() == [1, 2, 3, 4, 5]
    assert [batch.to_pydict() for batch in rows.batches(["b"], size=2)] == [
        {"b": ["x", "y"]},
        {"b": ["z"]},
        {"b": ["v", "w"]},
    ]
    assert rows.place(2).endswith("00000-of-00002.parquet: row 2") and rows.place(3).endswith(
        "00001-of-00002.parquet: row 0"
    )
    assert rows.need("b") == "b" and rows.need(("img", "a", "b")) == "a"
    with pytest.raises(
        DataError, match=r"00000-of-00002.parquet: there is no column 'c' or 'd'; known: a, b"
    ):
        rows.need(("c", "d"))


def test_files_are_opened_on_first_use(tmp_path: Path) -> None:
    assert ParquetRows([tmp_path / "not there.parquet"]).paths
    with pytest.raises(DataError, match="not there.parquet cannot be read as Parquet, download it again"):
        _ = ParquetRows([tmp_path / "not there.parquet"]).count


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _not_parquet(path: Path) -> None:
    path.write_text("<html>Not found</html>")


def _damaged_inside(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_empty, _half, _not_parquet, _damaged_inside, _a_folder])
def test_damaged_files_are_a_one_line_error(tmp_path: Path, damage: Any) -> None:
    good = write_table(tmp_path / "a.parquet", {"a": list(range(300))})
    bad = write_table(tmp_path / "b.parquet", {"a": list(range(300))})
    damage(bad)
    with pytest.raises(DataError) as error:
        rows = ParquetRows([good, bad])
        rows.column("a")
    assert str(error.value).startswith(
        f"{bad} cannot be read as Parquet, download it again"
    ) and "\n" not in str(error.value)
    with pytest.raises(DataError, match="b.parquet cannot be read"):
        list(ParquetRows([good, bad]).batches(["a"]))


def test_a_split_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a.parquet has no rows"):
        _ = ParquetRows([write_table(tmp_path / "a.parquet", {"a": np.zeros(0)})]).count


@pytest.mark.parametrize(
    ("other", "what"), [({"a": [1.5]}, "a"), ({"b": [1]}, "a, b"), ({"a": [1], "c": [1]}, "c")]
)
def test_files_with_different_columns_are_refused(tmp_path: Path, other: dict[str, list], what: str) -> None:
    rows = ParquetRows(
        [write_table(tmp_path / "a.parquet", {"a": [1]}), write_table(tmp_path / "b.parquet", other)]
    )
    with pytest.raises(DataError, match=rf"b.parquet has other columns than a.parquet \({what}\)"):
        _ = rows.count


# ---- labels ----


def split(path: Path, labels: Any, names: list[str] | None = None) -> ParquetRows:
    return ParquetRows([write_table(path, {"label": labels}, {"label": names} if names else None)])


def test_numbers_stay_and_the_files_name_the_classes(tmp_path: Path) -> None:
    train, test = (
        split(tmp_path / "a.parquet", [2, 0], ["x", "y", "z", "w"]),
        split(tmp_path / "b.parquet", [1]),
    )
    labels, classes, names = read_labels([train, test], "label")
    assert (
        labels.dtype == np.int64
        and labels.tolist() == [2, 0, 1]
        and classes == 4
        and names == ("x", "y", "z", "w")
    )
    assert read_labels(split(tmp_path / "c.parquet", [2, 0, 1, 1]), "label")[1:] == (3, ())
    assert read_labels(split(tmp_path / "d.parquet", [1.0, 0.0]), "label", 5)[0].tolist() == [1, 0]


@pytest.mark.parametrize("values", [["no", "yes", "maybe"], [False, True, True]])
def test_words_are_numbered_over_train_and_test_together(tmp_path: Path, values: list[Any]) -> None:
    train, test = split(tmp_path / "a.parquet", values[:1]), split(tmp_path / "b.parquet", values[1:])
    labels, classes, names = read_labels([train, test], "label")
    wanted = sorted({str(value).lower() for value in values})
    assert (
        names == tuple(wanted)
        and classes == len(wanted)
        and [names[label] for label in labels] == [str(v).lower() for v in values]
    )


def test_labels_outside_a_known_list_are_refused(tmp_path: Path) -> None:
    rows = split(tmp_path / "a.parquet", ["b", "a", "b"])
    assert read_labels(rows, "label", 3, ("b", "c", "a"))[0].tolist() == [0, 2, 0]
    with pytest.raises(
        DataError,
        match=r"a.parquet: row 0 has label 'b' in 'label', which is not one of the classes; known: a, c",
    ):
        read_labels(rows, "label", 2, ("a", "c"))


@pytest.mark.parametrize(
    ("values", "classes", "message"),
    [
        ([0, 1, 7], 3, r"b.parquet: row 2 has label 7 in 'label', expected whole numbers 0..2"),
        ([0, 1.5, 1], 3, "row 1 has label 1.5"),
        ([0, float("nan"), 1], 3, "row 1 has label nan"),
        (
            [0, -1, 1],
            3,
            (
                "row 1 has label -1 in 'label', which means no label on the Hub; set data.options.test_split"
                " to a split with"
            ),
        ),
        ([0, None, 1], 3, "row 1 has no value in 'label'"),
        (
            [0, 10**6, 1],
            None,
            "row 1 has label 1000000 in 'label', expected whole numbers from 0 on, less than the number of"
            " rows, 5",
        ),
        ([[0], [1], [1]], None, "column 'label' holds list<"),
        (["a", None, "b"], None, "row 1 has no value"),
    ],
)
def test_wrong_labels_name_file_and_row(
    tmp_path: Path, values: list[Any], classes: int | None, message: str
) -> None:
    good = split(tmp_path / "a.parquet", [0, 0])
    with pytest.raises(DataError) as error:
        read_labels([good, split(tmp_path / "b.parquet", values)], "label", classes)
    assert (
        message.replace("\\", "") in str(error.value)
        and "b.parquet" in str(error.value)
        and "\n" not in str(error.value)
    )


def test_another_dataset_is_detected_by_its_classes(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="column 'label' names 2 classes, expected 10; check that it is the right dataset"
    ):
        read_labels(split(tmp_path / "a.parquet", [0, 1], ["neg", "pos"]), "label", 10)
    with pytest.raises(DataError, match="has 2 different labels, expected 10"):
        read_labels(split(tmp_path / "a.parquet", ["neg", "pos"]), "label", 10)


def test_users_are_numbered_in_ascending_order(tmp_path: Path) -> None:
    assert read_users(split(tmp_path / "a.parquet", [1600, 7, 1600]), "label")[0].tolist() == [1, 0, 1]
    assert read_users(split(tmp_path / "a.parquet", [3.0, -1.0]), "label")[0].tolist() == [1, 0]
    unsigned = split(tmp_path / "a.parquet", pa.array([2**60 + 1, 2**63 + 5, 2**60 + 2], pa.uint64()))
    signed = split(tmp_path / "b.parquet", [2**60 + 3, -4])
    assert read_users([unsigned, signed], "label")[0].tolist() == [
        1,
        4,
        2,
        3,
        0,
    ]  # as float64 three of them would be one
    both = [split(tmp_path / "a.parquet", ["eve", "bob"]), split(tmp_path / "b.parquet", ["ann"])]
    assert read_users(both, "label")[0].tolist() == [2, 1, 0]


@pytest.mark.parametrize("value", [1.9, float("nan"), float("inf")])
def test_users_that_are_not_whole_numbers_are_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(
        DataError, match=f"a.parquet: row 1 has {value} in 'label', but users must be whole numbers or words"
    ):
        read_users(split(tmp_path / "a.parquet", [1.0, value]), "label")


def test_classes_in_another_order_are_matched_by_name(tmp_path: Path) -> None:
    train, test = (
        split(tmp_path / "a.parquet", [0, 1, 2], ["x", "y", "z"]),
        split(tmp_path / "b.parquet", [0, 1, 2, 0], ["y", "z", "x"]),
    )
    labels, classes, names = read_labels([train, test], "label")
    assert labels.tolist() == [0, 1, 2, 1, 2, 0, 1] and classes == 3 and names == ("x", "y", "z")
    assert read_labels([train, test], "label", 3, ("one", "two", "three"))[0].tolist() == [
        0,
        1,
        2,
        1,
        2,
        0,
        1,
    ]
    with pytest.raises(DataError, match="c.parquet: column 'label' names other classes than the train split"):
        read_labels([train, split(tmp_path / "c.parquet", [0], ["x", "y", "w"])], "label")


def test_files_of_one_split_must_agree_about_the_classes(tmp_path: Path) -> None:
    files = [
        write_table(tmp_path / f"{names}.parquet", {"label": [0]}, {"label": list(names)})
        for names in ("xy", "yx")
    ]
    with pytest.raises(
        DataError, match="yx.parquet names other classes of 'label' than xy.parquet, or in another order"
    ):
        ParquetRows(files).class_names("label")


@pytest.mark.parametrize(
    ("first", "second"), [([0, 1], ["a", "b"]), (["a", "b"], [0, 1]), ([0, 1], [True, False])]
)
def test_numbers_in_one_split_and_words_in_another_are_refused(
    tmp_path: Path, first: list[Any], second: list[Any]
) -> None:
    both = [split(tmp_path / "a.parquet", first), split(tmp_path / "b.parquet", second)]
    for read in (read_labels, read_users):
        with pytest.raises(
            DataError,
            match=r"b.parquet: column 'label' holds \w+, but \w+ in a.parquet; store it as the same type",
        ):
            read(both, "label")


def test_words_that_are_not_utf8_are_a_one_line_error(tmp_path: Path) -> None:
    rows = split(tmp_path / "a.parquet", pa.array([b"ok", b"\xff\xfe"], pa.binary()).view(pa.string()))
    for read in (read_labels, read_users):
        with pytest.raises(
            DataError, match="a.parquet: row 1 has a word in 'label' that is not UTF-8"
        ) as error:
            read(rows, "label")
        assert "\n" not in str(error.value)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([0])], names=["a", "a", "label"]),
        tmp_path / "a.parquet",
    )
    with pytest.raises(DataError, match="a.parquet has two columns called 'a'; rename one"):
        _ = ParquetRows([tmp_path / "a.parquet"]).count
