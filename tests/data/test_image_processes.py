"""Images that are decoded by several processes are the same, in the same order, with the same errors."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("PIL")
from PIL import Image  # noqa: E402

from holdfast.core.errors import DataError  # noqa: E402
from holdfast.data import image_processes  # noqa: E402
from holdfast.data.decode_image import ImageDecoder, ImageFormat  # noqa: E402
from holdfast.data.image_processes import Block, decoded  # noqa: E402

DECODER = ImageDecoder(ImageFormat("grey"), "grey", (2, 3))


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_processes, "_WORTH", 0.0)
    monkeypatch.setattr(image_processes, "_cores", lambda: 2)


def blocks(count: int, damaged: int | None = None) -> Iterator[Block]:
    """Blocks of two images, the i-th image of grey value i."""
    for begin in range(0, count, 2):
        items = []
        for number in (begin, begin + 1):
            file = io.BytesIO()
            Image.fromarray(np.full((2, 3), number, np.uint8)).save(file, "PNG")
            items.append(file.getvalue()[: 40 if number == damaged else None])
        yield items, lambda number, begin=begin: f"image {begin + number}"  # type: ignore[misc]


def test_processes_answer_in_order_and_an_error_names_the_place() -> None:
    pixels = np.concatenate(list(decoded(DECODER, blocks(14), 14)))
    assert pixels.shape == (14, 1, 2, 3) and pixels[:, 0, 1, 2].tolist() == list(range(14))
    found = decoded(DECODER, blocks(14, damaged=9), 14)
    assert [int(next(found)[0, 0, 0, 0]) for _ in range(4)] == [0, 2, 4, 6]
    with pytest.raises(DataError, match="^image 9 is not a readable image"):
        next(found)


@pytest.mark.parametrize("program", ["/nothing/here", "/bin/false"])
def test_where_processes_cannot_work_everything_is_decoded_here(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_processes, "command", lambda module, function: [program])
    pixels = np.concatenate(list(decoded(DECODER, blocks(6), 6)))
    assert pixels[:, 0, 0, 0].tolist() == list(range(6))
