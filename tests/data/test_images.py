"""Images: the known sets in the layouts they have, and folders of one's own."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core import progress
from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import build, describe, parts
from holdfast.data import images
from holdfast.data.moments import Moments
from holdfast.data.row_order import set_aside
from tests.data.folders import colour, encode, grey, wrapped, write_images, write_table

pytest.importorskip("pyarrow")
pytest.importorskip("PIL", reason="needs Pillow")

KNOWN = {  # columns, shape, classes, and a layout as on the Hub
    "mnist": ("image", "label", (1, 28, 28), 10, "mnist/{}-00000-of-00001.parquet", "test"),
    "fashion-mnist": ("image", "label", (1, 28, 28), 10, "fashion_mnist/{}-00000-of-00001.parquet", "test"),
    "emnist": ("image", "label", (1, 28, 28), 62, "default/{}/0000.parquet", "test"),
    "cifar10": ("img", "label", (3, 32, 32), 10, "plain_text/{}-00000-of-00001.parquet", "test"),
    "cifar100": ("img", "fine_label", (3, 32, 32), 100, "cifar100/{}-00000-of-00001.parquet", "test"),
    "svhn": ("image", "label", (3, 32, 32), 10, "cropped_digits/{}-00000-of-00001.parquet", "test"),
    "tiny-imagenet": (
        "image",
        "label",
        (3, 64, 64),
        200,
        "data/{}-00000-of-00001-1359597a978bc4fa.parquet",
        "valid",
    ),
}


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def load(name: str, dir: Path | None = None, **options: Any) -> Any:
    return build("source", {"name": name, **options}).load(dir)


def pixels(shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    return grey(count, shape[1]) if shape[0] == 1 else colour(count, shape[1])


@pytest.mark.parametrize("name", KNOWN)
def test_known_datasets_in_the_layout_of_the_hub(tmp_path: Path, name: str) -> None:
    column, label, shape, classes, layout, test = KNOWN[name]
    stored, labels = pixels(shape, 5), [0, classes - 1, 1, 2, classes - 1]
    names = [f"class {i}" for i in range(classes)]
    for split, part in (("train", slice(0, 3)), (test, slice(3, 5))):
        columns = {
            column: wrapped(stored[part]),
            label: labels[part],
            "coarse_label": [0] * len(labels[part]),
        }
        write_table(tmp_path / name.replace("-", "_") / layout.format(split), columns, {label: names})
    samples = load(name, tmp_path)
    assert samples.x.shape == (5, *shape) and samples.x.dtype == torch.uint8 and samples.train_rows == 3
    assert samples.classes == classes and samples.y.tolist() == labels and len(samples.class_names) == classes
    wanted = np.stack(stored)[:, None] if shape[0] == 1 else np.stack(stored).transpose(0, 3, 1, 2)
    assert np.array_equal(samples.x.numpy(), wanted.swapaxes(2, 3) if name == "emnist" else wanted)
    assert len(samples.mean) == len(samples.std) == shape[0] and samples.mean == parts("source")[name].mean


@pytest.mark.parametrize("name", KNOWN)
def test_known_datasets_document_their_origin_and_licence(name: str) -> None:
    card = describe(parts("source")[name])
    defaults = {item["name"]: item["default"] for item in card["settings"]}
    assert (
        "/" in defaults["repo"]
        and "Licence: " in card["text"]
        and "Columns " in card["text"]
        and card["paper"]
    )
    assert all(item["help"] for item in card["settings"])


def test_emnist_is_turned_upright_unless_it_already_is(tmp_path: Path) -> None:
    letter = np.zeros((28, 28), dtype=np.uint8)
    letter[3, 20] = 200  # stored in row 3, column 20
    write_images(tmp_path / "emnist", [letter] * 4, [10, 36, 61, 0])
    turned, kept = load("emnist", tmp_path), load("emnist", tmp_path, upright=False)
    assert turned.x[0, 0, 20, 3] == 200 and kept.x[0, 0, 3, 20] == 200
    assert [turned.class_names[label] for label in turned.y.tolist()] == ["A", "a", "z", "0"]


def test_cifar100_fine_and_coarse(tmp_path: Path) -> None:
    for split in ("train", "test"):
        columns = {"img": wrapped(colour(2)), "fine_label": [99, 3], "coarse_label": [19, 4]}
        write_table(tmp_path / "cifar100" / f"{split}.parquet", columns)
    fine, coarse = load("cifar100", tmp_path), load("cifar100", tmp_path, labels="coarse")
    assert (
        fine.classes == 100
        and fine.y.tolist() == [99, 3] * 2
        and coarse.classes == 20
        and coarse.y.tolist() == [19, 4] * 2
    )
    with pytest.raises(ConfigError, match="labels"):
        load("cifar100", tmp_path, labels="super")


def test_svhn_takes_the_cropped_digits_and_leaves_extra_out(tmp_path: Path) -> None:
    for subset in ("cropped_digits", "full_numbers"):
        for split in ("train", "test", "extra"):
            columns = {"image": wrapped(colour(2)), "label": [1, 2] if subset == "cropped_digits" else [8, 8]}
            write_table(tmp_path / "svhn" / subset / f"{split}-00000-of-00001.parquet", columns)
    assert load("svhn", tmp_path).y.tolist() == [1, 2, 1, 2]


# ---- folders of one's own ----


def test_five_lines_of_config_load_a_folder_of_images(tmp_path: Path) -> None:
    stored = [image.astype(np.uint8) for image in colour(10, 16)]
    columns = {
        "photo": wrapped(stored),
        "what": ["cat", "dog"] * 5,
        "who": ["ann", "bob", "eve", "bob", "ann"] * 2,
    }
    write_table(tmp_path / "pets" / "everything.parquet", columns)
    samples = load("images", tmp_path, folder="pets", image="photo", label="what", user="who", test=0.3)
    assert (
        samples.x.shape == (10, 3, 16, 16)
        and samples.train_rows == 7
        and samples.class_names == ("cat", "dog")
    )
    place, train_rows = set_aside(10, 0.3)
    assert train_rows == 7 and sorted(place) == list(range(10))
    for row, at in enumerate(place):  # labels, users and pixels move together
        assert np.array_equal(samples.x[at].numpy(), stored[row].transpose(2, 0, 1))
        assert samples.y[at] == row % 2 and samples.user[at] == [0, 1, 2, 1, 0][row % 5]
    train = np.stack([stored[row] for row in range(10) if place[row] < 7]) / 255
    np.testing.assert_allclose(samples.mean, train.mean((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(samples.std, train.std((0, 1, 2)), rtol=1e-9)


def test_users_of_images_are_numbered_from_zero(tmp_path: Path) -> None:
    write_table(
        tmp_path / "pets" / "train.parquet",
        {"image": wrapped(grey(4)), "label": [0, 1, 0, 1], "who": [100, 7, 100, 2**60]},
    )
    assert load("images", tmp_path, folder="pets", user="who", test=0).user.tolist() == [1, 0, 1, 2]


def test_another_repository_is_another_dataset(tmp_path: Path) -> None:
    for folder, label in (("mnist", 1), ("images", 2), ("letters", 3)):
        write_images(tmp_path / folder, grey(4), [label] * 4)
    assert load("mnist", tmp_path).y[0] == 1 and load("images", tmp_path).y[0] == 2
    assert (
        load("mnist", tmp_path, repo="me/letters").y[0] == 3
        and load("images", tmp_path, repo="me/letters").y[0] == 3
    )
    assert load("mnist", tmp_path, repo="me/letters", folder="images").y[0] == 2


def test_rows_set_aside_are_always_the_same_and_keep_their_order() -> None:
    place, stay = set_aside(1000, 0.2)
    assert stay == 800 and np.array_equal(place, set_aside(1000, 0.2)[0]) and len(set(place.tolist())) == 1000
    assert (np.diff(place[place < 800]) > 0).all() and (np.diff(place[place >= 800]) > 0).all()
    by_class = np.repeat(np.arange(10), 100)[place >= 800]  # also where the set is sorted by class
    assert np.bincount(by_class, minlength=10).min() > 5
    assert set_aside(5, 0.0)[0].tolist() == [0, 1, 2, 3, 4] and set_aside(5, 0.0)[1] == 5
    with pytest.raises(
        DataError, match="data.options.test: a share of 0.9 of 2 rows leaves none for training"
    ):
        set_aside(2, 0.9)


def test_grey_images_stored_as_colour_are_grey_if_all_are(tmp_path: Path) -> None:
    as_colour = [np.repeat(image[:, :, None], 3, 2) for image in grey(8, 8)]
    write_images(tmp_path / "g", as_colour, [0, 1] * 4, kind="WEBP")
    assert load("images", tmp_path, folder="g").sample_shape == (1, 8, 8)
    assert load("images", tmp_path, folder="g", mode="colour").sample_shape == (3, 8, 8)
    write_images(tmp_path / "c", [*as_colour[:2], *colour(6, 8)], [0, 1] * 4)
    samples = load("images", tmp_path, folder="c")
    assert samples.sample_shape == (3, 8, 8) and torch.equal(
        samples.x[0, 0], samples.x[0, 2]
    )  # some photographs are grey


def test_a_late_colour_image_among_grey_ones_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "LOOKED_AT", 2)
    write_images(tmp_path / "g", [*grey(3, 8), *colour(1, 8)], [0, 1, 0, 1])
    with pytest.raises(
        DataError,
        match="test.parquet: row 0 is in colour, but the first images are grey; set data.options.mode",
    ):
        load("images", tmp_path, folder="g")
    assert load("images", tmp_path, folder="g", mode="grey").sample_shape == (1, 8, 8)


def test_sizes_that_differ_need_a_size(tmp_path: Path) -> None:
    flat = [np.full((side, side + 2, 3), 50 + side, dtype=np.uint8) for side in (8, 16, 9, 8)]
    flat[0][0, 0] = (0, 100, 200)
    write_images(tmp_path / "s", flat, [0, 1, 0, 1], "img")
    with pytest.raises(
        DataError,
        match=r"row 1 is 16 x 18; set data.options.size to resize all images, the first is 8 x 10",
    ):
        load("images", tmp_path, folder="s")
    samples = load("images", tmp_path, folder="s", size=4)
    assert samples.sample_shape == (3, 4, 4) and (samples.x[1] == 66).all() and (samples.x[3] == 58).all()


def test_kinds_of_images_may_be_mixed(tmp_path: Path) -> None:
    one = colour(1, 8)[0]
    stored = [encode(one, "PNG"), encode(one, "WEBP"), encode(one, "BMP"), encode(one, "PNG")]
    write_images(tmp_path / "m", stored, [0, 1, 0, 1])
    x = load("images", tmp_path, folder="m").x
    assert all(np.array_equal(x[i].numpy(), one.transpose(2, 0, 1)) for i in range(4))


def test_large_images_are_written_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "l", colour(8, 8), list(range(8)))
    whole = load("images", tmp_path, folder="l")
    monkeypatch.setattr(images, "AT_ONCE", 1)
    pieces = load("images", tmp_path, folder="l", size=8)
    assert (
        torch.equal(whole.x, pieces.x)
        and whole.mean == pytest.approx(pieces.mean)
        and whole.std == pytest.approx(pieces.std)
    )


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1, 2], "column 'image' holds int64, not encoded images"),
        (["a.png", "b.png"], "column 'image' holds string, not encoded images"),
        (
            [{"path": "a.png"}, {"path": "b.png"}],
            "column 'image' holds struct<path: string>, not encoded images",
        ),
        ([{"bytes": None, "path": "a.png"}, {"bytes": b"x", "path": None}], "row 0 holds no image bytes"),
    ],
)
def test_columns_without_images_are_refused(tmp_path: Path, column: list[Any], message: str) -> None:
    write_table(tmp_path / "n" / "train.parquet", {"image": column, "label": [0, 1]})
    with pytest.raises(DataError) as error:
        load("images", tmp_path, folder="n", test=0.5)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_image_is_a_one_line_error(tmp_path: Path, kind: str) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(colour(1, 32)[0]).save(file, kind)
    write_images(tmp_path / "h", [file.getvalue()[: len(file.getvalue()) // 2]] * 4, [0] * 4)
    with pytest.raises(DataError, match="train.parquet: row 0 is not a readable image: ") as error:
        load("images", tmp_path, folder="h")
    assert "\n" not in str(error.value)


def saved(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def stored(tmp_path: Path, *encoded: bytes, **options: Any) -> np.ndarray:
    """The pixels that these images become."""
    write_table(tmp_path / "own" / "train.parquet", {"image": list(encoded), "label": [0] * len(encoded)})
    return load("images", tmp_path, folder="own", test=0, **options).x.numpy()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PGM"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, kind: str) -> None:
    from PIL import Image

    wide = np.array([[0, 128, 129, 257], [25700, 32768, 65406, 65535]], dtype=np.uint16)
    encoded = (
        b"P5 4 2 65535 " + wide.astype(">u2").tobytes()
        if kind == "PGM"
        else saved(Image.fromarray(wide), kind)
    )
    assert stored(tmp_path, encoded).tolist() == [
        [[[0, 0, 1, 1], [100, 128, 254, 255]]]
    ]  # divided by 257, to the nearest
    assert stored(tmp_path, encoded, mode="colour").shape == (1, 3, 2, 4)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixel_modes_without_a_fixed_range_are_refused(tmp_path: Path, mode: str) -> None:
    from PIL import Image

    with pytest.raises(
        DataError,
        match=f"row 0 is not a readable image: pixels of mode {mode} have no fixed range, expected"
        " 8 or 16 bits",
    ):
        stored(tmp_path, saved(Image.new(mode, (2, 2)), "TIFF"))


def test_transparent_pixels_are_put_on_white(tmp_path: Path) -> None:
    from PIL import Image

    grey_half = Image.fromarray(np.array([[[100, 255], [100, 0]]], dtype=np.uint8))
    assert stored(tmp_path, saved(grey_half, "PNG")).tolist() == [[[[100, 255]]]]
    colour_half = Image.fromarray(
        np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 51]]], dtype=np.uint8)
    )
    assert stored(tmp_path, saved(colour_half, "PNG"))[0, :, 0].T.tolist() == [
        [10, 20, 30],
        [255] * 3,
        [204] * 3,
    ]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        assert stored(tmp_path, saved(palette, kind))[0, :, 0].T.tolist() == [[10, 20, 30], [40, 50, 60]]
        assert stored(tmp_path, saved(palette, kind, transparency=1))[0, :, 0].T.tolist() == [
            [10, 20, 30],
            [255] * 3,
        ]
    assert stored(tmp_path, saved(Image.new("1", (2, 1), 1), "PNG")).tolist() == [[[[255, 255]]]]
    assert stored(tmp_path, saved(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF")).tolist() == [
        [[[255]], [[0]], [[0]]]
    ]


def test_a_photo_with_two_frames_is_read(tmp_path: Path) -> None:
    from PIL import Image

    photo = Image.fromarray(colour(1, 8)[0])
    plain, double = saved(photo, "JPEG"), saved(photo, "MPO", save_all=True, append_images=[photo])
    x = stored(tmp_path, plain, double, plain, encode(colour(1, 8)[0]), double)
    assert np.array_equal(x[0], x[2]) and np.array_equal(x[1], x[4]) and len(x) == 5


def test_formats_for_which_pillow_starts_other_programs_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import EpsImagePlugin, Image

    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *args, **options: pytest.fail("Ghostscript was started")
    )
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    for encoded in (eps, saved(Image.new("L", (4, 4)), "PCX")):
        with pytest.raises(
            DataError, match="row 0 is not a readable image: expected PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM$"
        ):
            stored(tmp_path, encoded)
        assert Image.open(io.BytesIO(encoded)).format in ("EPS", "PCX")  # which Pillow would have read


def test_huge_images_are_refused_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    from PIL import Image, ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    limit = Image.MAX_IMAGE_PIXELS
    for side, why in (
        (9000, "9000 x 9000 pixels are more than"),
        (10000, "10000 x 10000 pixels are more than"),
        (100000, "exceeds limit"),
    ):
        with pytest.raises(
            DataError, match=f"row 0 is not a readable image: .*{why}"
        ) as error:  # the last two Pillow minds by itself
            stored(tmp_path, b"P5 %d %d 255 " % (side, side), size=8)
        assert "\n" not in str(error.value)
    assert not recwarn.list and limit == Image.MAX_IMAGE_PIXELS


def test_moments_by_pieces_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(3)
    for x in (
        rng.integers(0, 256, (50, 3, 4, 4), dtype=np.uint8),
        rng.normal(1e6, 1, (50, 2, 7)),
        rng.normal(size=(50, 5)),
    ):
        whole = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1) / (255 if x.dtype == np.uint8 else 1)
        moments = Moments()
        for begin in (0, 7, 8, 30):
            moments.add(x[begin : {0: 7, 7: 8, 8: 30, 30: 50}[begin]])
        moments.add(x[:0])
        np.testing.assert_allclose(moments.mean, whole.mean(1), rtol=1e-12)
        np.testing.assert_allclose(moments.std, whole.std(1), rtol=1e-9)
    flat = Moments()
    flat.add(np.full((3, 1, 2, 2), 9, dtype=np.uint8))
    assert flat.std == (1.0,)


# ---- the bar ----


def test_progress_is_shown_only_for_slow_work(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, shown in ((1.0, ""), (3.0, "decoding x: 10 of 20\n")):
        times = iter([0.0, seconds, seconds])
        with progress.progress("decoding x", 20, lambda times=times: next(times)) as advance:
            advance(10)
            advance(10)
        assert capsys.readouterr().err == shown


def test_a_progress_bar_beside_another_live_display_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(console=Console(stderr=True)) as other:
        other.add_task("rounds", total=3)
        with progress.progress("decoding [x]", 20) as advance:
            advance(5)
            advance(15)
    assert "decoding [x]" in capsys.readouterr().err
