"""Turn texts into rows of hashed words, so that no vocabulary is made, stored or sent.

A word becomes a number from 1 to 2^31 - 1 that depends only on its letters, the same in every process and on
every machine; 0 fills the row after the end of a text. A model takes the numbers modulo the rows of its
embedding, so the size of the embedding is a setting of the model and not of the data.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Literal

import numpy as np

HASHES = 2**31 - 1  # the numbers of an int32 above 0
MOST_KNOWN = (
    2**20
)  # number of distinct words remembered; then the memory is cleared, so that it stays bounded

_TAG = re.compile(r"</?[a-z]+\s*/?>")  # <br /> and similar; a lone < or > is punctuation
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
# neither Latin letters nor typographic punctuation
_MAY_HAVE_MARKS = re.compile("[\u0300-\u1fff\u20d0-\U0010ffff]")


class WordHasher:
    """Turns texts into rows of `length` hashes. Of a longer text, the first words (head) or the last words
    (tail) are kept."""

    def __init__(self, length: int, keep: Literal["head", "tail"] = "head"):
        self.length, self.keep = length, keep
        self._known = _Known()

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        """Return int32 [len(texts), length]; a text without words is a row of zeros."""
        out = np.zeros((len(texts), self.length), dtype=np.int32)
        for row, text in zip(out, texts, strict=True):
            words = split_words(text)
            words = words[: self.length] if self.keep == "head" else words[-self.length :]
            row[: len(words)] = [self._known[word] for word in words]
        return out


class _Known(dict[str, int]):
    """Hashes of words seen before: a corpus has far fewer distinct words than words."""

    def __missing__(self, word: str) -> int:
        if len(self) >= MOST_KNOWN:
            self.clear()
        self[word] = number = hash_word(word)
        return number


def hash_word(word: str | bytes) -> int:
    """Return 1..2^31 - 1 from the eight-byte blake2b of the word's UTF-8 bytes, read as a little-endian
    number."""
    digest = blake2b(
        word.encode("utf-8", "surrogatepass") if isinstance(word, str) else word, digest_size=8
    ).digest()
    return 1 + int.from_bytes(digest, "little") % HASHES


def split_words(text: str) -> list[str]:
    """Return lower-case runs of letters and digits of any script, with apostrophes inside them; everything
    else separates words.

    Scripts without spaces (Chinese, Japanese, Thai) give long runs: separate their words beforehand.
    """
    text = text.lower()
    if "<" in text:
        text = _TAG.sub(" ", text)
    if not text.isascii():
        # one spelling of an accented letter, and of the apostrophe
        text = unicodedata.normalize("NFC", text).replace("’", "'")
        if _MAY_HAVE_MARKS.search(text):
            return _word_with_marks().findall(text.replace("_", " "))
    return _WORD.findall(text)


@cache
def _word_with_marks() -> re.Pattern[str]:
    """Vowel signs and lone accents are no letters to Python's \\w and would cut their word in two. Slow, so
    only where needed."""
    marks = "".join(
        char for char in map(chr, range(0x300, 0x20000)) if unicodedata.category(char).startswith("M")
    )
    return re.compile(rf"[\w{marks}]+(?:'[\w{marks}]+)*")
