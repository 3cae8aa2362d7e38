"""The sample store: every row of a dataset once; everything else refers to its rows."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from holdfast.core.errors import DataError

_HASHED_WHOLE = 1 << 28  # bytes; of a larger store, _HASHED_ROWS evenly spread rows are hashed
_HASHED_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows [0, train_rows) are the dataset's train split, the rest its test split. Bytes are stored as bytes
    and normalised when they are gathered."""

    x: Tensor  # [N, ...] uint8 or float32; or int32: words as hashes >= 1, with 0 after the end of a text
    y: Tensor  # [N] int64
    classes: int
    train_rows: int
    # one number for all channels, or one per channel; for bytes on the scale 0..1
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    name: str = ""
    # [N] int64: the user who recorded the row, from 0 on, where the dataset has users
    user: Tensor | None = None
    class_names: tuple[str, ...] = ()  # one per class, where the dataset has names
    user_names: tuple[str, ...] = ()  # one per user, where users are words
    # Tensors beside x, because a copy from the host is not allowed while a CUDA graph is being captured.
    _shift: Tensor = field(init=False, repr=False)
    _scale: Tensor = field(init=False, repr=False)
    _moved: dict[torch.device, Samples] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)
        unit = 255.0 if self.x.dtype == torch.uint8 else 1.0
        object.__setattr__(self, "_shift", self._per_channel(self.mean) * unit)
        object.__setattr__(self, "_scale", self._per_channel(self.std) * unit)

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def words(self) -> bool:
        """Whether a sample is a text: hashes of words, which a model looks up, not numbers to compute
        with."""
        return self.x.dtype == torch.int32

    def batch(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the normalised samples of these rows: [*rows.shape, *sample_shape]; words as int64,
        unchanged."""
        flat = self.x.index_select(0, rows.reshape(-1))
        if self.words:
            flat = flat.to(torch.int64)
        else:
            flat = (flat.to(dtype) - self._shift.to(dtype)) / self._scale.to(dtype)
        return flat.reshape(*rows.shape, *self.sample_shape)

    def blank(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a sample of zeros, as a network receives it; it exists also where there are no samples."""
        return torch.zeros(
            self.sample_shape, dtype=torch.int64 if self.words else dtype, device=self.x.device
        )

    def on(self, device: torch.device) -> Samples:
        """Return the store on a device: it is moved once, and all callers share the copy."""
        if device == self.x.device:
            return self
        if device not in self._moved:
            self._moved[device] = self.to(device)
        return self._moved[device]

    def to(self, device: torch.device | str) -> Samples:
        user = None if self.user is None else self.user.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), user=user)

    @cached_property
    def digest(self) -> str:
        """Identifies the content of the store, so that a run does not continue with other samples under the
        same labels."""
        x = self.x.cpu()
        if x.numel() * x.element_size() > _HASHED_WHOLE:
            x = x[torch.linspace(0, len(x) - 1, min(len(x), _HASHED_ROWS), dtype=torch.float64).long()]
        about = (tuple(self.x.shape), str(x.dtype), self.classes, self.train_rows, self.mean, self.std)
        sha = hashlib.sha256(repr(about).encode())
        for part in (x, self.y, self.user):
            if part is not None:
                sha.update(part.cpu().contiguous().numpy().data)
        return sha.hexdigest()

    def _per_channel(self, values: tuple[float, ...]) -> Tensor:
        shape = [len(values)] + [1] * (len(self.sample_shape) - 1) if self.sample_shape else []
        return torch.tensor(values, dtype=torch.float64, device=self.x.device).view(shape)


def _check(samples: Samples) -> None:
    name, rows = samples.name or "samples", samples.x.shape[0]
    if samples.x.dtype not in (torch.uint8, torch.float32, torch.int32):
        raise DataError(f"{name}: x must be uint8, float32 or (words) int32, not {samples.x.dtype}")
    if samples.y.dtype != torch.int64 or samples.y.shape != (rows,):
        raise DataError(
            f"{name}: y must be {rows} int64 labels, not {tuple(samples.y.shape)} of {samples.y.dtype}"
        )
    if samples.user is not None and samples.user.shape != (rows,):
        raise DataError(f"{name}: user must have {rows} entries, not {tuple(samples.user.shape)}")
    if rows and not (0 <= int(samples.y.min()) and int(samples.y.max()) < samples.classes):
        raise DataError(
            f"{name}: labels must be 0..{samples.classes - 1}, found"
            f" {int(samples.y.min())}..{int(samples.y.max())}"
        )
    if samples.class_names and len(samples.class_names) != samples.classes:
        raise DataError(
            f"{name}: there are {len(samples.class_names)} class names for {samples.classes} classes"
        )
    if not 0 <= samples.train_rows <= rows:
        raise DataError(f"{name}: train_rows is {samples.train_rows} but there are {rows} rows")
    channels = samples.sample_shape[0] if samples.sample_shape else 1
    if len(samples.mean) not in (1, channels) or len(samples.std) not in (1, channels):
        raise DataError(f"{name}: mean and std need 1 or {channels} numbers, one per channel")
    if not all(math.isfinite(m) for m in samples.mean) or not all(
        math.isfinite(s) and s > 0 for s in samples.std
    ):
        raise DataError(f"{name}: mean must be finite and std positive")
