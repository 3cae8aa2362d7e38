"""Collect what `holdfast show` prints about a part or about the config, as plain data."""

from __future__ import annotations

from typing import Any, get_args

from holdfast.core.registry import build, find, is_section, settings_of
from holdfast.core.toml import to_toml

# The place of each kind of part in a config file.
_PLACES: dict[str, Any] = {
    "method": lambda part: {"method": part},
    "model": lambda part: {"model": part},
    "aggregator": lambda part: {
        "aggregator": part | _assumed(part["name"]),
        **_root_of(find("aggregator", part["name"]).model_construct()),
    },
    "attack": lambda part: {"attack": part},
    "trigger": lambda part: {"attack": {"name": "backdoor", "trigger": part}},
    "wrapper": lambda part: {
        "aggregator": {"name": "mean", "f": 0.3, "wrap": [part]},
        **_root_of(_wrapped(part["name"])),
    },
    "server": lambda part: {"method": {"name": "fedavg"}, "server": part},
    "detector": lambda part: {"detectors": [part]},
    "partition": lambda part: {"data": {"partition": part}},
    "source": lambda part: {
        "data": {"name": part["name"], "options": {k: v for k, v in part.items() if k != "name"}}
    },
    "loss": lambda part: {"train": {"loss": part}},
    "optimizer": lambda part: {"optimizer": part},
    "schedule": lambda part: {"schedule": part},
}


def _assumed(aggregator: str) -> dict[str, Any]:
    """Return an f for rules that need one; all rules work with this share of attackers."""
    from holdfast.aggregators.base import Aggregator

    rule: Any = find("aggregator", aggregator).model_construct()
    return {"f": 0.2} if isinstance(rule, Aggregator) and rule.idle() else {}


def _wrapped(wrapper: str) -> Any:
    """Return the plain mean with this wrapper around it."""
    return build("wrapper", wrapper)(build("aggregator", {"name": "mean", "f": 0.3}))


def _root_of(rule: Any) -> dict[str, Any]:
    """Return samples for the server, for rules that compare with its own data."""
    return {"data": {"root": 100}} if "root" in getattr(rule, "needs", ()) else {}


def example(card: dict[str, Any]) -> str:
    """Return an example config file with the part and all its settings."""
    part = {
        "name": card["name"],
        **{s["name"]: s["default"] for s in card["settings"] if s["default"] is not None},
    }
    return to_toml(_PLACES[card["kind"]](part)).rstrip()


def fields_of() -> dict[str, list[dict[str, Any]]]:
    """Return every section of a config with its settings; top-level settings are under an empty name."""
    from holdfast.experiment.config import Config

    nested = {
        name: section
        for name, field in Config.model_fields.items()
        for section in (field.annotation, *get_args(field.annotation))  # some sections may be left out
        if is_section(section)
    }
    top = [card for card in settings_of(Config) if card["name"].partition(".")[0] not in nested]
    return {"": top, **{name: settings_of(section) for name, section in nested.items()}}


def section_help(section: str) -> str:
    """Return what a whole section is for, where it says so: one that may be left out does."""
    from holdfast.experiment.config import Config

    return Config.model_fields[section].description or "" if section else ""
