"""What a run directory cannot hold, Python objects and data that was not copied, and the call that gives it
again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.registry import plugin_options
from holdfast.data.handed.kept import is_missing
from holdfast.experiment.object_names import is_word, unnamed

_NAME = re.compile(r"[A-Za-z_][\w.]*")


def arguments(config: Mapping[str, Any], data: bool = False) -> list[str]:
    """The keyword arguments that give the objects of a plain config again, and its `data`.

    >>> arguments({"model": "<Net>", "train": {"loss": "<my_loss>"}})
    ['model=Net', 'train={"loss": my_loss}']"""
    found: dict[str, dict[str, str]] = {}
    for path in unnamed(config):
        section, _, key = path.partition(".")
        found.setdefault(section, {})[key] = _spelt(config[section], key)
    said = [f"{section}={_argument(keys)}" for section, keys in found.items()]
    return said + ["data=data"] * data


def call(name: str, folder: Path, config: Mapping[str, Any]) -> str:
    """A call in Python on the folder of a run with this plain config, such as holdfast.open('runs/first',
    model=Net)."""
    again = arguments(config, is_missing(config, folder))
    return f"holdfast.{name}({', '.join([repr(str(folder)), *again])})"


def how_to_resume(folder: Path, manifest: Mapping[str, Any]) -> str:
    """The command that continues a run; a call in Python where a command cannot."""
    config = manifest["config"]
    if unnamed(config) or is_missing(config, folder):
        return f"`{call('resume', folder, config)}` in Python"
    return f"`holdfast resume {shlex.quote(str(folder))}{plugin_options(manifest.get('plugins', []))}`"


def without_model_objects(config: Mapping[str, Any]) -> dict[str, Any]:
    """A plain config with default model and loss in place of Python objects."""
    train = {name: given for name, given in config["train"].items() if not is_word(given)}
    return {
        name: train if name == "train" else given
        for name, given in config.items()
        if name != "model" or not is_word(given)
    }


def refuse_words(config: Mapping[str, Any]) -> None:
    """Refuse a config, from a file perhaps, that has only words for Python objects. Names of clients and
    other data may be any words."""
    chosen = {name: given for name, given in config.items() if name != "data"}
    if found := unnamed(chosen):
        raise ConfigError(
            f"{found[0]} was a Python object, for which a file has only a word; give it in Python, beside the"
            f" config: {', '.join(arguments(chosen))}"
        )


def _argument(keys: Mapping[str, str]) -> str:
    if "" in keys:
        return keys[""]
    if any("." in key or key.isdigit() for key in keys):
        return "..."  # within a list or a table, which has to be given whole
    return "{" + ", ".join(f'"{key}": {said}' for key, said in keys.items()) + "}"


def _spelt(section: Any, key: str) -> str:
    """What to write for an object, from the word that a plain config has for it."""
    for step in filter(None, key.split(".")):
        section = section[int(step) if isinstance(section, list) else step]
    word = str(section)[1:-1].replace("<locals>.", "")
    kind, _, inner = word.partition("(")
    if kind == "Model" and inner:
        return _model(inner.removesuffix(")"))
    name = kind.rpartition(".")[2]
    return name if word == kind and _NAME.fullmatch(name) else f"{name}(...)" if _NAME.match(name) else "..."


def _model(inner: str) -> str:
    """holdfast.Model(Net, head="fc") for the words Net,head=fc."""
    source, *settings = inner.split(",")
    pairs = [setting.partition("=") for setting in settings]
    if (
        source == "lambda"
        or "(" in inner
        or not _NAME.fullmatch(source)
        or any(not said for _, _, said in pairs)
    ):
        return "holdfast.Model(...)"
    given = [f"{name}=None" if said == "None" else f'{name}="{said}"' for name, _, said in pairs]
    return f"holdfast.Model({', '.join([source, *given])})"
