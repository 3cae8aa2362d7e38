"""Load pretrained weights from a safetensors file (never a pickle, which could run code), checked against the
network before a run starts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from holdfast.core.errors import ConfigError, in_print
from holdfast.core.flat import Layout
from holdfast.core.memory import physical_memory
from holdfast.core.reading import read_whole


class Weights:
    """A file that a model starts from; with `fresh`, all but its head. It is read only when a run begins: a
    run that is resumed has its start in its own folder."""

    def __init__(self, file: str, head: str | None = "head", fresh: bool = False):
        if fresh and not head:
            raise ConfigError(
                'model.weights_head = "fresh" needs a head; name the submodule, as in'
                " holdfast.Model(module, head='fc')"
            )
        self.file, self.head, self.fresh = file, head, fresh
        self.digest: str | None = None
        """SHA-256 of the file, once it has been read."""

    @classmethod
    def of(cls, model: Any) -> Weights | None:
        """Return the file that a part or a `Model` asks for, or None."""
        file = getattr(model, "weights", None)
        if file is None and getattr(model, "weights_head", "file") == "fresh":
            raise ConfigError(
                'model.weights_head = "fresh" leaves out the head of a file; set the file in model.weights'
            )
        return (
            None
            if file is None
            else cls(str(file), getattr(model, "head", "head"), model.weights_head == "fresh")
        )

    def into(self, module: nn.Module) -> nn.Module:
        """Load the file's tensors into the module and return it."""
        tensors = _by_own_names(self._read(), module)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        wanted = [
            slot.name for slot in Layout.of(module).slots if not (self.fresh and self._of_head(slot.name))
        ]
        self._check_names(tensors, wanted, module.state_dict())
        with torch.no_grad():
            for name in wanted:
                own[name].copy_(self._fitting(name, tensors[name], own[name]))
        return module

    def _read(self) -> dict[str, Tensor]:
        try:
            content = read_whole(Path(self.file).expanduser(), physical_memory())
            self.digest = hashlib.sha256(content).hexdigest()
            return load(content)
        except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of ~user is unknown
            raise ConfigError(
                f"model.weights: {self.file} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        except (SafetensorError, ValueError, KeyError) as error:
            raise ConfigError(
                f"model.weights: {self.file} is not a safetensors file: {in_print(str(error))[:200]}"
            ) from None

    def _of_head(self, name: str) -> bool:
        return self.head is not None and (name == self.head or name.startswith(f"{self.head}."))

    def _check_names(
        self, tensors: Mapping[str, Tensor], wanted: Collection[str], possible: Collection[str]
    ) -> None:
        """Check that all wanted tensors are there, and no others; of tied tensors both names may be."""
        missing = [name for name in wanted if name not in tensors]
        extra = [
            name for name in tensors if name not in possible and not (self.fresh and self._of_head(name))
        ]
        if missing:
            there = f"; it has {_named(extra)}" if extra else ""
            raise ConfigError(
                f"model.weights: {self.file} lacks {_named(missing)}{there}{self._hint(missing[0])}"
            )
        if extra:
            raise ConfigError(
                f"model.weights: {self.file} has {_named(extra)}, which the model does not have"
            )

    def _fitting(self, name: str, found: Tensor, own: Tensor) -> Tensor:
        """Return one of the file's tensors in the model's own dtype."""
        if found.shape != own.shape:
            shapes = f"{list(found.shape)} in {self.file}, {list(own.shape)} in the model"
            raise ConfigError(f"model.weights: '{name}' has shape {shapes}{self._hint(name)}")
        if found.is_floating_point() != own.is_floating_point():
            raise ConfigError(
                f"model.weights: '{name}' is {found.dtype} in {self.file}, {own.dtype} in the model"
            )
        value = found.to(own.dtype)
        if not bool(torch.isfinite(value).all()):
            raise ConfigError(f"model.weights: '{name}' in {self.file} has values that are not finite")
        return value

    def _hint(self, name: str) -> str:
        return '; model.weights_head = "fresh" leaves the file\'s head out' if self._of_head(name) else ""


def _by_own_names(tensors: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Rename tensors to the module's own names: a tensor that is used in several places has several names,
    and a file may have any of them."""
    first: dict[int, str] = {}
    for name, own in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        leading = first.setdefault(id(own), name)
        if name in tensors:
            tensors.setdefault(leading, tensors[name])
    return tensors


def _named(names: list[str]) -> str:
    return f"'{in_print(names[0])[:100]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
