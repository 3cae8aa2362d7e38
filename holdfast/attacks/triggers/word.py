"""Words put into a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import field_validator
from torch import Tensor

from holdfast.attacks.triggers.base import Change, DataKind, Stamp
from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.data.hashed_words import hash_word, split_words
from holdfast.data.samples import Samples


@register(
    "trigger",
    "word",
    paper="Kurita, Michel and Neubig: Weight Poisoning Attacks on Pretrained Models, ACL 2020",
)
class Word(Stamp):
    """Puts a word (or several) into a text: at the start, at the end, or before the word of a given number.

    The other words move on; in a text that is full, the last ones fall out, or, where the trigger is put at
    the end, make room for it. The words are rare ones, such as the paper's cf, mn, bb, tq and mb, and are
    hashed as those of the dataset."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "for": "texts",
        "what it changes": "a word is put in",
        "settings, with their defaults": '`words = "cf"`, `place = "start"`',
    }
    fits: ClassVar[frozenset[DataKind]] = frozenset({"text"})
    words: str = setting("cf", "the word, or several words")
    place: Literal["start", "end"] | int = setting(
        "start", "start, end, or the number of the word (from 0) before which it is put"
    )

    @field_validator("words")
    @classmethod
    def _some(cls, words: str) -> str:
        if not split_words(words):
            raise ValueError("holds no word; give one of letters or digits")
        return words

    @field_validator("place")
    @classmethod
    def _counted(cls, place: int | str) -> int | str:
        if isinstance(place, int) and place < 0:
            raise ValueError("the number of a word is counted from 0")
        return place

    def change(self, samples: Samples) -> Change:
        return self._insertion(split_words(self.words), samples)

    def parts(self, samples: Samples, count: int) -> Sequence[Change]:
        """Each part has some of the words."""
        self.on(samples)
        words = split_words(self.words)
        if len(words) < count:
            raise ConfigError(
                f"attack.parts: a trigger of {len(words)} words cannot be divided into {count} parts; give"
                " more words in attack.trigger.words"
            )
        ends = [round(len(words) * part / count) for part in range(count + 1)]
        return [self._insertion(words[a:b], samples) for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def _insertion(self, words: Sequence[str], samples: Samples) -> Change:
        put = torch.tensor([hash_word(word) for word in words], dtype=torch.int32)
        (length,) = samples.sample_shape
        if len(put) > length:
            raise ConfigError(
                f"attack.trigger.words: {len(put)} words do not fit into a text of {length}; give fewer"
            )
        place = {"start": 0, "end": length}.get(str(self.place), self.place)
        assert isinstance(place, int)

        def stamp(x: Tensor) -> Tensor:
            """Words stand before the zeros that fill a row."""
            count = (x != 0).sum(1)
            begin = count.clamp(max=min(place, length - len(put)))[:, None]
            column = torch.arange(length)
            moved = x.roll(len(put), 1)
            new = put[(column - begin).clamp(0, len(put) - 1)]
            return torch.where(column < begin, x, torch.where(column < begin + len(put), new, moved))

        return stamp
