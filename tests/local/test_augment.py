from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.local.augment import Augment, rotate, shift

EVERYTHING = Augment(crop=2, flip=0.5, rotation=30, jitter=0.4)
KEYS = Key(7).fold(torch.arange(3))


def images(
    n: int = 3,
    batch: int = 4,
    channels: int = 3,
    height: int = 6,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return Key(1).normal(n, batch, channels, height, width, dtype=dtype)


def test_a_hash_starts_the_same_whatever_its_length() -> None:
    assert torch.equal(KEYS.hash(9)[:, :4], KEYS.hash(4))
    assert torch.equal(KEYS.hash(9, 2)[:, :4], KEYS.hash(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_crop_equals_reflect_padding_and_slicing(dtype: torch.dtype) -> None:
    x, crop = images(dtype=dtype), 3
    out = Augment(crop=crop)(x, KEYS)
    shifts = KEYS.fold("crop").hash(4, 2) % (2 * crop + 1)
    assert len(shifts.unique()) > 3
    for i in range(3):
        for j in range(4):
            top, left = shifts[i, j].tolist()
            padded = F.pad(x[i, j], (crop,) * 4, mode="reflect")
            assert torch.equal(out[i, j], padded[:, top : top + 6, left : left + 8])


def test_shift_by_hand() -> None:
    x = torch.arange(9.0).view(1, 1, 1, 3, 3)
    out = shift(x, torch.tensor([[1]]), torch.tensor([[-2]]))
    assert out[0, 0, 0].tolist() == [[5, 4, 3], [8, 7, 6], [5, 4, 3]]


def test_crop_covers_every_window() -> None:
    x = torch.arange(64.0).view(1, 1, 1, 8, 8).expand(1, 400, 1, 8, 8)
    centres = Augment(crop=1)(x, Key(0).fold(torch.arange(1)))[0, :, 0, 4, 4]
    assert sorted(centres.unique().tolist()) == [27, 28, 29, 35, 36, 37, 43, 44, 45]


def test_flip_follows_its_draws() -> None:
    x = images()
    flipped = KEYS.fold("flip").uniform(4) < 0.5
    assert 0 < flipped.sum() < 12
    out = Augment(flip=0.5)(x, KEYS)
    for i in range(3):
        for j in range(4):
            assert torch.equal(out[i, j], x[i, j].flip(-1) if flipped[i, j] else x[i, j])
    assert torch.equal(Augment(flip=1)(x, KEYS), x.flip(-1))


def test_flip_happens_as_often_as_asked() -> None:
    x = torch.tensor([0.0, 1.0]).expand(2, 5000, 1, 1, 2)
    share = Augment(flip=0.3)(x, KEYS[:2])[..., 0, 0, 0].mean()
    assert abs(share - 0.3) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_by_quarters(dtype: torch.dtype) -> None:
    x = images(2, 3, height=7, width=7, dtype=dtype)
    degrees = torch.tensor([[0.0, 90.0, 180.0], [-90.0, 360.0, 270.0]])
    quarters = [[0, 1, 2], [-1, 0, 3]]
    out = rotate(x, degrees)
    assert out.dtype == dtype
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(
                out[i, j], torch.rot90(x[i, j], quarters[i][j], (1, 2)), atol=1e-5, rtol=0
            )


def test_rotation_keeps_the_aspect_of_oblong_images() -> None:
    x = torch.zeros(1, 1, 1, 5, 9)
    x[..., 2, 3:6] = 1.0  # a bar of three pixels through the centre
    out = rotate(x, torch.tensor([[90.0]]))
    expected = torch.zeros(5, 9)
    expected[1:4, 4] = 1.0
    torch.testing.assert_close(out[0, 0, 0], expected, atol=1e-6, rtol=0)


def test_rotation_stays_within_its_bound() -> None:
    x = torch.zeros(1, 200, 1, 21, 21)
    x[..., 10, 18] = 1.0  # 8 pixels to the right of the centre
    out = Augment(rotation=15)(x, Key(3).fold(torch.arange(1)))[0, :, 0]
    rows = (out.sum(2) * torch.arange(21)).sum(1) / out.sum((1, 2)) - 10  # where the dot went, downwards
    assert rows.abs().max() <= 8 * torch.sin(torch.deg2rad(torch.tensor(15.0))) + 0.05
    assert rows.min() < -1.5 and rows.max() > 1.5


def test_jitter_equals_a_slow_reference() -> None:
    x, key = images(dtype=torch.float64), KEYS.fold("jitter")
    out = Augment(jitter=0.4)(x, KEYS)
    factors = [
        1 + 0.4 * (2 * key.fold(name).uniform(4, dtype=torch.float64) - 1)
        for name in ("brightness", "contrast", "saturation")
    ]
    for i in range(3):
        for j in range(4):
            brightness, contrast, saturation = (float(f[i, j]) for f in factors)
            image = x[i, j] * brightness
            image = image.mean() + contrast * (image - image.mean())
            image = image.mean(0) + saturation * (image - image.mean(0))
            torch.testing.assert_close(out[i, j], image, atol=1e-12, rtol=0)


def test_jitter_of_grey_images_has_no_saturation() -> None:
    x = images(channels=1)
    out = Augment(jitter=0.9)(x, KEYS)
    spread = (out - out.mean((2, 3, 4), keepdim=True)) / (x - x.mean((2, 3, 4), keepdim=True))
    assert torch.allclose(spread, spread[..., :1, :1], rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "augment", [Augment(crop=2), Augment(flip=0.5), Augment(rotation=30), Augment(jitter=0.4), EVERYTHING]
)
def test_a_row_alone_and_a_shorter_batch_get_the_same_images(augment: Augment, dtype: torch.dtype) -> None:
    x = images(n=3, batch=13, height=9, width=9, dtype=dtype)
    whole = augment(x, KEYS)
    assert whole.shape == x.shape and whole.dtype == dtype
    assert not torch.equal(whole, x)
    tolerance = 0.0 if dtype == torch.float32 else 1e-12
    for row in range(3):
        torch.testing.assert_close(
            augment(x[row : row + 1], KEYS[row : row + 1])[0], whole[row], atol=tolerance, rtol=0
        )
    torch.testing.assert_close(augment(x[:, :5], KEYS), whole[:, :5], atol=tolerance, rtol=0)


def test_rows_slots_and_changes_draw_independent_numbers() -> None:
    x = images(1, 1).expand(3, 4, 3, 6, 8)
    out = EVERYTHING(x, KEYS).flatten(0, 1)
    assert len(out.unique(dim=0)) == 12
    assert not torch.equal(EVERYTHING(x, Key(8).fold(torch.arange(3))), EVERYTHING(x, KEYS))


def test_without_settings_images_stay_as_they_are() -> None:
    x = images()
    assert Augment()(x, KEYS) is x
    Augment().check((64,))  # tables are fine as long as nothing is asked
    assert EVERYTHING(x[:, :0], KEYS).shape == (3, 0, 3, 6, 8)


def test_the_input_is_not_written_to() -> None:
    x = images()
    before = x.clone()
    EVERYTHING(x, KEYS)
    assert torch.equal(x, before)


def test_samples_that_are_not_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"augment needs images .* \[9, 128\]"):
        Augment(flip=0.5).check((9, 128))
    with pytest.raises(ConfigError, match="augment needs images"):
        Augment(flip=0.5)(torch.zeros(3, 4, 64), KEYS)
    with pytest.raises(ConfigError, match=r"augment.crop = 8 must be smaller than the image \(8x8\)"):
        Augment(crop=8).check((1, 8, 8))
    Augment(crop=7)(torch.zeros(3, 4, 1, 8, 8), KEYS)
    for wrong in ({"crop": -1}, {"flip": 1.5}, {"rotation": 181}, {"jitter": 2}, {"blur": 1}):
        with pytest.raises(ValidationError):
            Augment(**wrong)
