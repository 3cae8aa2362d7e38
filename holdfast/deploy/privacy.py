"""Clips and noises what leaves a node, on the node itself, and accounts for it. This file does not use
Flower.

    STATE-DIR/privacy.json      every release so far, of all runs: noise multiplier and how often

All fields of kind `update` of a reply together are clipped to length `clip`, and every number gets Gaussian
noise with deviation `noise * clip`. Two clients' clipped updates are at most 2 * clip apart, so for a server
that knows who took part, and may suppose any other data behind the update, the noise multiplier is noise / 2;
that is what is accounted, without any gain from sampling. Noise comes from the operating system, never from
the run's seed, which the server knows: a noised run cannot be repeated bit by bit."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import lock, unlock, write_json
from holdfast.core.reading import is_number, is_whole, read_json
from holdfast.core.registry import setting
from holdfast.core.types import UNDEFINED, Field, Schema
from holdfast.engine.client_task import EVALUATE
from holdfast.experiment.config import Section

_ALPHAS = [
    1.001,
    1.003,
    1.01,
    1.03,
    *(1 + x / 10 for x in range(1, 100)),
    *map(float, range(12, 64)),
    *(2.0**x for x in range(6, 14)),
]
Releases = list[tuple[float, int]]
"""Noise multipliers and how often each was used, in order."""


class PrivacySettings(Section):
    """[privacy] of a node.toml."""

    clip: float = setting(1.0, "length to which a longer update is clipped", gt=0)
    noise: float = setting(
        1.0,
        "standard deviation of the noise on every number, in units of clip; 0: no noise and no guarantee",
        ge=0,
    )
    delta: float = setting(
        1e-5, "probability that the guarantee does not hold; well below 1 / clients", gt=0, lt=1
    )
    epsilon: float | None = setting(
        None, "an update that would bring the node above this is not sent; none: no limit", gt=0
    )
    others: Literal["withhold", "send"] = setting(
        "withhold",
        "fields that noise on updates does not protect: withheld or refused; or sent unchanged, and the"
        " guarantee is for updates only",
    )
    count: int = setting(1, "withhold: the number of samples that is sent instead of the true one", ge=1)


def epsilon_of(releases: Releases, delta: float) -> float:
    """Return epsilon by Opacus (Renyi divergences) for Gaussian releases that all concern this client's
    data."""
    from opacus.accountants import RDPAccountant

    if not releases:
        return 0.0
    if any(multiplier <= 0 for multiplier, _ in releases):
        return math.inf
    accountant = RDPAccountant()
    accountant.history = [(multiplier, 1.0, times) for multiplier, times in releases]
    return float(accountant.get_epsilon(delta, alphas=_ALPHAS))


class Account:
    """Counts the releases of this client's data; each is on the disk before it leaves."""

    def __init__(self, state: Path):
        self.file = Path(state) / "privacy.json"

    @property
    def releases(self) -> Releases:
        content = read_json(self.file)
        if content is None:
            return []
        listed = content.get("releases")
        if not isinstance(listed, list) or not all(
            isinstance(one, list) and len(one) == 2 and _is_release(*one) for one in listed
        ):
            raise RunError(
                f"{self.file} is damaged: it does not say what was spent, so nothing is sent; restore it"
                " from a copy"
            )
        return [(float(multiplier), times) for multiplier, times in listed]

    def with_one(self, multiplier: float) -> Releases:
        before = self.releases
        if before and before[-1][0] == multiplier:
            return [*before[:-1], (multiplier, before[-1][1] + 1)]
        return [*before, (multiplier, 1)]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the account: a node without a resident trainer may answer a late request beside the next one,
        and both count."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        handle = lock(self.file.with_name("privacy.lock"), wait=True)
        assert handle is not None
        try:
            yield
        finally:
            unlock(handle)

    def write(self, releases: Releases) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, {"releases": [list(entry) for entry in releases]})

    def spent(self, delta: float) -> dict[str, float]:
        """Return what was spent: by the last participation alone, and at client level by all together."""
        releases = self.releases
        last: Releases = [(releases[-1][0], 1)] if releases else []
        return {
            "participations": sum(times for _, times in releases),
            "delta": delta,
            "epsilon/participation": epsilon_of(last, delta),
            "epsilon/client": epsilon_of(releases, delta),
        }


def _is_release(multiplier: Any, times: Any) -> bool:
    return is_number(multiplier) and multiplier >= 0 and is_whole(times, least=1)


class Guard:
    """Checks and protects every reply before it leaves the node."""

    def __init__(self, settings: PrivacySettings, state: Path, norm_cap: float):
        if find_spec("opacus") is None:
            raise ConfigError(
                "[privacy] needs an accountant, which is not installed: pip install 'holdfast[privacy]'"
            )
        self.settings, self.account, self.norm_cap = settings, Account(state), norm_cap

    @property
    def multiplier(self) -> float:
        return self.settings.noise / 2

    def check(self, schema: Schema, task: str) -> None:
        """Raise an error, before any work is done, if the reply may not leave."""
        size = sum(_size(schema[name]) for name in _updates(schema))
        length = self.settings.clip * (1 + self.settings.noise * math.sqrt(size))
        if length > self.norm_cap:
            raise ConfigError(
                f"privacy: an update with its noise is about {length:.0f} long and would be refused as a"
                f" fault; raise train.norm_cap (now {self.norm_cap:g}), or lower privacy.clip or"
                " privacy.noise"
            )
        if self.settings.others == "withhold":
            bare = refused(schema, task)
            if bare:
                raise ConfigError(
                    f"privacy: '{bare[0]}' would be sent, and noise on updates does not protect it; choose a"
                    ' method that sends updates only, or accept it with privacy.others = "send"'
                )
        if size and self.settings.epsilon is not None:
            after = epsilon_of(self.account.with_one(self.multiplier), self.settings.delta)
            if after > self.settings.epsilon:
                raise RunError(
                    f"privacy: the budget is spent (epsilon would be {after:.3g}, privacy.epsilon is"
                    f" {self.settings.epsilon:g})"
                )

    def protect(self, fields: Mapping[str, Tensor], schema: Schema, task: str) -> dict[str, Tensor]:
        """Return the reply as it may leave. A repeated reply is noised anew and so counted again."""
        names = _updates(schema)
        with self.account.held():
            self.check(schema, task)
            if names:
                # Before it leaves: a crash may count too much, never too little.
                self.account.write(self.account.with_one(self.multiplier))
        out = dict(fields)
        if self.settings.others == "withhold":
            for name, field in schema.items():
                instead = _withheld(name, field, task, self.settings.count)
                if instead is not None:
                    out[name] = torch.full_like(fields[name], instead)
        if names:
            out |= noised({name: fields[name] for name in names}, self.settings.clip, self.settings.noise)
            self._report(schema)
        return out

    def _report(self, schema: Schema) -> None:
        spent = self.account.spent(self.settings.delta)
        bare = [name for name, field in schema.items() if _bare(field)]
        aside = f"; not protected: {', '.join(bare)}" if bare and self.settings.others == "send" else ""
        print(
            f"privacy: participation {spent['participations']:.0f}, epsilon"
            f" {spent['epsilon/participation']:.4g} alone and {spent['epsilon/client']:.4g} in all, delta"
            f" {self.settings.delta:g}{aside}",
            file=sys.stderr,
            flush=True,
        )


def noised(updates: Mapping[str, Tensor], clip: float, noise: float) -> dict[str, Tensor]:
    """Return one client's update (one row of each tensor) clipped as a whole and then noised number by
    number."""
    flat = torch.cat([value.reshape(-1).double() for value in updates.values()])
    length = float(flat.norm())
    if not math.isfinite(length):
        raise RunError("privacy: the update is not finite; nothing is sent")
    flat = flat * min(1.0, clip / length if length else 1.0) + noise * clip * secure_normal(len(flat))
    parts = flat.split([value.numel() for value in updates.values()])
    return {
        name: part.reshape(value.shape).to(value.dtype)
        for (name, value), part in zip(updates.items(), parts, strict=True)
    }


def secure_normal(n: int) -> Tensor:
    """Return float64 [n], standard normal by Box and Muller, from the operating system's randomness alone."""
    pairs = (n + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), dtype="<u8").reshape(2, pairs) >> 11  # 53 bits each
    radius = np.sqrt(-2.0 * np.log((bits[0] + 1.0) * 2.0**-53))
    angle = 2.0 * np.pi * (bits[1] * 2.0**-53)
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n])


def refused(schema: Schema, task: str) -> list[str]:
    """Return the fields that a reply would send unprotected: noise on updates does not cover them, and no
    constant can replace them."""
    return [
        name for name, field in schema.items() if _bare(field) and _withheld(name, field, task, 1) is None
    ]


def _updates(schema: Schema) -> list[str]:
    return [name for name, field in schema.items() if field.kind == "update" and _size(field)]


def _bare(field: Field) -> bool:
    """Return whether noise on updates does not protect this field."""
    return field.kind != "update" and _size(field) > 0


def _size(field: Field) -> int:
    return math.prod(field.shape)


def _withheld(name: str, field: Field, task: str, count: int) -> float | None:
    """Return a constant without information that every server half understands; None if there is none."""
    if field.kind == "update":
        return None
    if field.low == UNDEFINED:  # a figure that a client need not have
        return UNDEFINED
    if task == EVALUATE:  # a client without test samples
        return 0.0
    if field.kind == "scalar":
        return 0.0
    return float(count) if (name, field.kind, field.shape) == ("count", "count", ()) else None
