from __future__ import annotations

import subprocess
import sys
from hashlib import blake2b

import numpy as np
import pytest

from holdfast.data import hashed_words
from holdfast.data.hashed_words import WordHasher, hash_word, split_words


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The cat sat.", ["the", "cat", "sat"]),
        ("good<br /><br />bad<BR>worse</i>", ["good", "bad", "worse"]),
        ("1 < 2 and 3 > 2", ["1", "2", "and", "3", "2"]),  # no tag, nothing lost
        ("don't 'quote' rock'n'roll it''s", ["don't", "quote", "rock'n'roll", "it", "s"]),
        ("don’t", ["don't"]),  # the typographic apostrophe is the same one
        ("snake_case 3.5 a-b", ["snake", "case", "3", "5", "a", "b"]),
        ("CAFÉ cafe\u0301", ["café", "café"]),  # two spellings of one letter
        ("Привет, мир!", ["привет", "мир"]),
        ("हिन्दी में_लिखा", ["हिन्दी", "में", "लिखा"]),  # vowel signs belong to their word
        ("", []),
        (" \n\t…— <br/>", []),
    ],
)
def test_a_text_is_split_into_words(text: str, wanted: list[str]) -> None:
    assert split_words(text) == wanted


def test_the_hash_is_the_documented_one_and_the_same_in_every_process() -> None:
    assert hash_word("holdfast") == 1 + int.from_bytes(
        blake2b(b"holdfast", digest_size=8).digest(), "little"
    ) % (2**31 - 1)
    assert (hash_word("the"), hash_word("café")) == (1226901888, 89234367)
    command = [
        sys.executable,
        "-c",
        "from holdfast.data.hashed_words import hash_word; print(hash_word('the'), hash_word('café'))",
    ]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [
        "1226901888",
        "89234367",
    ]


def test_hashes_are_positive_int32_and_spread() -> None:
    row = WordHasher(20000).rows([" ".join(f"w{i}" for i in range(20000))])[0]
    assert row.dtype == np.int32 and row.min() >= 1
    assert len(np.unique(row)) > 19990
    assert np.bincount(row % 16, minlength=16).min() > 1100  # 1,250 expected in each


def test_rows_are_padded_or_truncated() -> None:
    a, b, c = (hash_word(word) for word in "abc")
    assert WordHasher(3).rows(["a b", "a b c a", "", "!?"]).tolist() == [
        [a, b, 0],
        [a, b, c],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert WordHasher(2, "tail").rows(["a", "a b c"]).tolist() == [[a, 0], [b, c]]
    assert WordHasher(4).rows([]).shape == (0, 4)


def test_memory_of_known_words_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a b c d", "d c b a e f"]
    wanted = WordHasher(6).rows(texts)
    monkeypatch.setattr(hashed_words, "MOST_KNOWN", 2)
    small = WordHasher(6)
    assert np.array_equal(small.rows(texts), wanted) and len(small._known) <= 2
