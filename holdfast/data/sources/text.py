"""Texts as hashed words: what the known datasets share, and `text` for a folder of your own."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from holdfast.core.errors import DataError
from holdfast.core.progress import progress
from holdfast.core.registry import register, setting
from holdfast.data.cache import New
from holdfast.data.hashed_words import WordHasher
from holdfast.data.parquet import ParquetRows
from holdfast.data.row_order import RowOrder
from holdfast.data.sources.base import REPO_HELP
from holdfast.data.sources.labelled import LabelledSource, Scale

_LENGTH = "number of words of a sample; shorter texts are filled with 0"


@register("source", "text")
class Text(LabelledSource):
    """Texts of your own: Parquet files with a column of texts and one of labels. Words are stored as hashes,
    without a vocabulary.

    Licence: that of your data.
    """

    normalise: Literal["dataset"] = setting(
        "dataset", "always dataset: words are looked up, not computed with"
    )
    text: str = setting("text", "column of the texts")
    length: int = setting(128, _LENGTH, ge=1)
    keep: Literal["head", "tail"] = setting(
        "head", "words of a longer text to keep: the first (head) or the last (tail)"
    )

    def _fill(self, order: RowOrder, new: New) -> Scale:
        x = new("x", (order.count, self.length), np.int32)
        words, begin = WordHasher(self.length, self.keep), 0
        with progress(f"hashing the words of {self.name}", order.count) as advance:
            for rows in order.parts:
                at = 0  # row in this split
                for batch in rows.batches([self.text]):
                    texts = read_texts(batch.column(0), rows, at, self.text)
                    x[order.place[begin : begin + len(texts)]] = words.rows(texts)
                    at, begin = at + len(texts), begin + len(texts)
                    advance(len(texts))
        return (0.0,), (1.0,)


@register(
    "source",
    "ag-news",
    paper="Zhang, Zhao, LeCun: Character-level Convolutional Networks for Text Classification, NeurIPS 2015",
)
class AgNews(Text):
    """AG News: 120,000 + 7,600 news items (title and first lines), 4 classes, 64 words each.

    Columns text, label (0 World, 1 Sports, 2 Business, 3 Sci/Tech). Licence: for research and other
    non-commercial use, as its readme says.

    """

    classes: ClassVar[int | None] = 4
    class_names: ClassVar[tuple[str, ...]] = ("World", "Sports", "Business", "Sci/Tech")
    also: ClassVar[tuple[str, ...]] = ("agnews",)
    repo: str | None = setting("fancyzhx/ag_news", REPO_HELP)
    length: int = setting(64, _LENGTH, ge=1)


@register("source", "imdb", paper="Maas et al.: Learning Word Vectors for Sentiment Analysis, ACL 2011")
class Imdb(Text):
    """IMDB: 25,000 + 25,000 film reviews, 2 classes, 256 words each; its unlabelled reviews are left out.

    Columns text, label (0 neg, 1 pos). Licence: none stated; its authors ask to cite the paper.
    """

    classes: ClassVar[int | None] = 2
    class_names: ClassVar[tuple[str, ...]] = ("neg", "pos")
    also: ClassVar[tuple[str, ...]] = ("aclImdb",)
    repo: str | None = setting("stanfordnlp/imdb", REPO_HELP)
    length: int = setting(256, _LENGTH, ge=1)


def read_texts(column: Any, rows: ParquetRows, before: int, name: str) -> list[str]:
    """Return the texts of a batch that begins after `before` rows of its split."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise DataError(
            f"{rows.paths[0]}: column '{name}' holds {column.type}, not texts; set data.options.text"
        )
    if column.null_count:
        raise DataError(
            f"{rows.place(before + column.is_null().index(True).as_py())} has no text in '{name}'; write"
            " an empty text, or remove such rows"
        )
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{rows.place(before)} or a row soon after it has a text in '{name}' that is not UTF-8:"
            f" {error.reason}"
        ) from None
