"""What was handed over, as one sample store that can be written and named by a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

Kind = str  # "images", "numbers", "words" or "table"
SHOWN = 12  # letters of a digest in messages, labels and file names


@dataclass(frozen=True, eq=False)
class Content:
    """The arrays of a sample store and what else is needed to use them; rows [0, train_rows) are for
    training, the rest are test sets. `user` says whose each row is, where that is known."""

    x: np.ndarray
    y: np.ndarray
    user: np.ndarray | None
    kind: Kind
    classes: int
    class_names: tuple[str, ...]
    train_rows: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for _, array in self.arrays())

    def arrays(self) -> list[tuple[str, np.ndarray]]:
        found = [("x", self.x), ("y", self.y), ("user", self.user)]
        return [(name, array) for name, array in found if array is not None]

    def facts(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON holds it."""
        return {
            "kind": self.kind,
            "classes": self.classes,
            "class_names": list(self.class_names),
            "train_rows": self.train_rows,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def digest(self) -> str:
        """SHA-256 of all rows and labels. Mean and deviation follow from them."""
        facts = {name: fact for name, fact in self.facts().items() if name not in ("mean", "std")}
        sha = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for name, array in self.arrays():
            sha.update(f"{name} {array.dtype.str} {array.shape}".encode())
            sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return sha.hexdigest()


class HandedOver:
    """Samples by their digest: in memory, in a file, or only their name, in which case they cannot be used
    before they are handed over again."""

    def __init__(self, digest: str, read: Callable[[], Content], keep: int = 0):
        self.digest, self._read = digest, read
        self.keep = keep
        """Bytes up to which a run directory gets a copy."""
        self._content: Content | None = None

    @staticmethod
    def of(content: Content, keep: int) -> HandedOver:
        made = HandedOver(content.digest(), lambda: content, keep)
        made.content()
        return made

    def content(self) -> Content:
        if self._content is None:
            self._content = _IN_USE.get(self.digest) or self._read()
            _IN_USE[self.digest] = self._content
        return self._content

    @property
    def short(self) -> str:
        return self.digest[:SHOWN]

    def __repr__(self) -> str:
        return f"<samples {self.digest}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HandedOver) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


_IN_USE: WeakValueDictionary[str, Content] = WeakValueDictionary()
"""Contents that this process uses: the runs of a sweep, and a run and its results, share one."""
