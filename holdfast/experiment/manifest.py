"""A run directory's manifest: what was asked for, and what the bits depend on."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeGuard

import torch
from pydantic import TypeAdapter

from holdfast.core.errors import ConfigError, RunError, UnknownPart
from holdfast.core.reading import is_whole, read_json
from holdfast.core.registry import plugin_of
from holdfast.core.version import __version__
from holdfast.data.federation import DataSettings
from holdfast.data.handed.content import HandedOver
from holdfast.data.handed.kept import check_given, with_data
from holdfast.experiment.config import Config, Parts, completed, make_config
from holdfast.experiment.config_tables import merge
from holdfast.experiment.given_again import call
from holdfast.experiment.loop import Experiment
from holdfast.experiment.object_names import agree, first_difference, is_word, unnamed
from holdfast.local.plan import Plan

_MANY = 4096  # threads or processes: a larger number is a mistake
TRIALS = "trials.csv"
"""The file by which the folder of a fair comparison (`holdfast tune`) is recognised."""


def run_folders(out: Path) -> list[Path]:
    """The runs in a directory: itself, or its folders. Of a fair comparison, those of its report, not its
    trials."""
    out = Path(out)
    if (out / "manifest.json").exists():
        return [out]
    if (out / TRIALS).exists() and is_sweep(out / "report"):
        return run_folders(out / "report")
    return sorted(file.parent for file in out.glob("*/manifest.json"))


def no_run(folder: Path) -> str:
    """Why a folder that was named has no run, and what to do."""
    if not Path(folder).exists():
        return f"no run in {folder}: there is no such folder; runs are under runs/ unless --out named another"
    if not Path(folder).is_dir():
        return f"no run in {folder}: it is a file; name the folder of a run"
    inside = sorted(file.parent.name for file in Path(folder).glob("*/manifest.json"))
    if inside:
        one = Path(folder) / inside[0]
        return f"no run in {folder}, but {len(inside)} in folders below it; name one, such as {one}"
    return f"no run in {folder}: neither it nor a folder below it has a manifest.json; name that of a run"


def is_sweep(path: Path) -> bool:
    return (Path(path) / "sweep.json").exists()


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / "manifest.json")
    if manifest is None:
        raise ConfigError(no_run(folder))
    expected = {
        "config": dict,
        "plan": dict,
        "threads": int,
        "device": str,
        "label": str,
        "group": list,
        "partition": str,
        "initial": str,
    }
    broken = [name for name, kind in expected.items() if not isinstance(manifest.get(name), kind)] or _broken(
        manifest
    )
    if broken:
        raise RunError(f"{folder / 'manifest.json'} is damaged: '{broken[0]}' cannot be read")
    return manifest


def _broken(manifest: Mapping[str, Any]) -> list[str]:
    """Names of the values of a manifest that are damaged, where all have the right type."""
    config, malicious = manifest["config"], manifest.get("malicious")
    sections = [config.get(name) for name in ("data", "train", "evaluate", "engine")]
    sound = all(isinstance(section, dict) for section in sections) and is_whole(
        config["train"].get("rounds"), least=1
    )
    sound = (
        sound
        and type(config.get("seed")) is int
        and all(isinstance(config.get(name), (str, dict)) for name in ("method", "model"))
    )
    sound = sound and all(
        name in config and isinstance(config[name], (str, dict, type(None)))
        for name in ("aggregator", "attack")
    )
    sound = sound and isinstance(config.get("server"), (str, dict, type(None)))  # 0.1 had none
    sound = sound and isinstance(config.get("privacy"), (dict, type(None)))
    good = {
        "config": (
            sound
            and are_words(config["evaluate"].get("metrics", []))
            and are_words(config["data"].get("names", []))
        ),
        "plan": is_plan(manifest["plan"]),
        "threads": is_whole(manifest["threads"], least=1, most=_MANY),
        "device": is_device(manifest["device"]),
        "group": are_words(manifest["group"]),
        "malicious": (
            isinstance(malicious, str) or isinstance(malicious, list) and all(map(is_whole, malicious))
        ),
        "plugins": are_words(manifest.get("plugins", [])),
        "client_names": are_words(manifest.get("client_names", [])),
        "ranks": is_whole(manifest.get("ranks", 1), least=1),
    }
    return [name for name, fits in good.items() if not fits]


def are_words(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def is_device(value: Any) -> bool:
    """The name of one, whether it is here or not."""
    return isinstance(value, str) and re.fullmatch(r"[\w:.-]{1,40}", value) is not None


def are_terms(threads: Any, device: Any, torch: Any) -> bool:
    """What the bits of experiments that run together depend on, besides their plans."""
    return is_whole(threads, least=1, most=_MANY) and is_device(device) and isinstance(torch, str)


def is_plan(table: Any) -> bool:
    """Whether a table from a file is a plan that this machine can follow: its numbers of rows and processes
    are bounded."""
    if not isinstance(table, Mapping) or table.keys() - Plan.__dataclass_fields__.keys():
        return False
    try:
        plan = TypeAdapter(Plan).validate_json(json.dumps(table), strict=True)
    except (ValueError, TypeError):
        return False
    counts = [plan.rows, *plan.sizes, *([] if plan.stack is None else [plan.stack])]
    return all(is_whole(count, least=1, most=2**40) for count in counts) and is_whole(
        plan.workers, least=1, most=_MANY
    )


def config_of(
    folder: Path, manifest: Mapping[str, Any], given: Config | None = None, data: Sequence[HandedOver] = ()
) -> Config:
    """The config a run began with: from its manifest, or given again where the manifest cannot hold it.
    `data` is what was handed over in Python, given again."""
    check_given([manifest["config"]], folder, data)
    if given is not None:
        began = completed(manifest["config"])
        given = with_model_of(began, given)
        plain = given.plain()
        if is_word(began["model"]) and is_word(plain["model"]):
            began["model"] = plain[
                "model"
            ]  # the model may be made in another way: check_same compares the weights
        again = given.data.options.get("samples")
        if isinstance(again, HandedOver):
            check_given([began], folder, [again])
        if not agree(began, plain):
            key = first_difference(began, plain)
            raise ConfigError(
                f"{folder} began with another config than the one given: {key} differs; give the same, or"
                " begin a new run"
            )
        return given
    objects = unnamed(manifest["config"])
    if objects:
        raise ConfigError(
            f"{folder}: {objects[0]} was a Python object, which a folder cannot hold; give it again:"
            f" {call('open', folder, manifest['config'])}, or holdfast.resume with the same to continue"
        )
    table = with_data(manifest["config"], folder, data)
    return with_parts(lambda: make_config(table), folder, manifest.get("plugins", []))


def config_again(
    folder: Path, manifest: Mapping[str, Any], data: Sequence[HandedOver], sections: Mapping[str, Any]
) -> Config:
    """The config a run began with, where the sections that held Python objects are given again."""
    if not sections:
        return config_of(folder, manifest, data=data)
    given = make_config(merge(with_data(manifest["config"], folder, data), sections))
    return config_of(folder, manifest, given, data)


def with_model_of(began: Mapping[str, Any], given: Config) -> Config:
    """The config with the model that a run began with, where the config leaves the choice to Holdfast: the
    manifest names the choice, and version 0.1 chose otherwise."""
    model, was = given.plain()["model"], began["model"]
    auto = (model.get("name") if isinstance(model, Mapping) else model) == "auto"
    return given.model_copy(update={"model": was}) if auto and not is_word(was) else given


def warn_of_objects(folder: Path, config: Config) -> None:
    """Warn that names and settings of Python objects are compared, but not their code: other code under the
    same name would mix two experiments."""
    if objects := unnamed(config.plain()):
        warnings.warn(
            f"{folder} goes on with Python objects ({', '.join(objects)}); their names and settings are"
            " unchanged, but their code cannot be compared: make sure that it is the same",
            UserWarning,
            stacklevel=2,
        )


def with_parts(read: Callable[[], Config], folder: Path, plugins: Sequence[str]) -> Config:
    """A config whose parts are all known. Plug-ins that a run directory names are not loaded unless the user
    asks for it: another user may have written the files."""
    try:
        config = read()
        config.parts()
        return config
    except UnknownPart as error:
        if not plugins:
            raise
        unknown, names = str(error).partition(";")[0], ", ".join(map(str, plugins))
        raise ConfigError(
            f"{folder}: {unknown}; this run used plug-ins ({names}); if you trust them, pass --plugin FILE"
        ) from None


def manifest_of(
    experiment: Experiment,
    plan: Plan,
    threads: int,
    device: str,
    group: Sequence[str],
    plugins: Sequence[str],
    sweep: bool = False,
) -> dict[str, Any]:
    """The manifest of a run. `group` names the cells that run together with it, itself included; a run on its
    own has a group of one and is not part of a sweep."""
    return {
        "holdfast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "label": experiment.label,
        "config": experiment.config.plain(),
        "plan": asdict(plan),
        "threads": threads,
        "device": device,
        "group": list(group),
        "sweep": sweep,
        "partition": experiment.federation.digest,
        "samples": experiment.federation.samples.digest,
        "initial": digest_of(experiment.initial),
        "weights": (
            None
            if experiment.weights is None
            else {"file": experiment.weights.file, "sha256": experiment.weights.digest}
        ),
        "plugins": sorted(
            {
                *(str(Path(p).resolve()) for p in plugins),
                *plugins_of(experiment.parts, experiment.config.data),
            }
        ),
        "clients": experiment.federation.clients,
        **_client_names(experiment),
        **_ranks(experiment),
        "parameters": experiment.network.layout.parameters,
        "malicious": (
            "redrawn every round" if experiment.adversary.redraws else experiment.adversary.malicious.tolist()
        ),
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _ranks(experiment: Experiment) -> dict[str, int]:
    """How many processes began the run together. Any number goes on with the same bits, also one, as long as
    it computes as several do."""
    share = experiment.run_context.share
    return {} if share is None else {"ranks": share.ranks.count}


def _client_names(experiment: Experiment) -> dict[str, list[str]]:
    """The names that the data gave the clients; those of data.names are in the config."""
    names = () if experiment.config.data.names else experiment.federation.names
    return {"client_names": list(names)} if names else {}


def digest_of(initial: torch.Tensor) -> str:
    """A digest of the start weights, which may come with a user's own module."""
    return hashlib.sha256(initial.cpu().numpy().tobytes()).hexdigest()


def plugins_of(parts: Parts, data: DataSettings) -> set[str]:
    """The plug-in files behind an experiment's parts, however they were loaded."""
    rule, around = parts.aggregator.layers()
    chosen = (
        parts.method,
        parts.model,
        rule,
        *around,
        *parts.detectors,
        parts.server,
        parts.attack,
        parts.loss,
        data.partitioner(),
        data.source(),
    )
    return {file for file in map(plugin_of, chosen) if file is not None}


def folder_name(place: int, cells: int, label: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)[:80]
    number = (  # as wide as the largest, so that folders sort as cells do
        f"{place:0{max(3, len(str(cells - 1)))}d}"
    )
    return f"{number}-{safe}" if safe else number
