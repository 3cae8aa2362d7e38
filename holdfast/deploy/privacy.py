"""Protects what leaves a node, on the node itself, and accounts for it (holdfast/privacy says how). This file
does not use Flower.

    STATE-DIR/privacy.json      every release so far, of all runs: noise multiplier and how often

Noise comes from the operating system, never from the run's seed, which the server knows: a noised run cannot
be repeated bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.core.errors import RunError
from holdfast.core.files import lock, unlock, write_json
from holdfast.core.reading import is_number, is_whole, read_json
from holdfast.core.types import Schema
from holdfast.privacy.accounting import Releases, epsilon_of, need_accountant
from holdfast.privacy.protection import Protection, secure_normal
from holdfast.privacy.settings import PrivacySettings


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

    def with_more(self, multiplier: float, times: int = 1) -> Releases:
        before = self.releases
        if before and before[-1][0] == multiplier:
            return [*before[:-1], (multiplier, before[-1][1] + times)]
        return [*before, (multiplier, times)]

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
        need_accountant()
        self.settings, self.account, self.norm_cap = settings, Account(state), norm_cap
        self.protection = Protection(settings)

    def check(self, schema: Schema, task: str, times: int = 1) -> None:
        """Raise an error if the reply may not leave: before any work is done, and again where it took several
        passes over the data (level sample)."""
        self.protection.check(schema, task, self.norm_cap)
        if self.protection.releases(schema) and self.settings.epsilon is not None:
            after = epsilon_of(self.account.with_more(self.protection.multiplier, times), self.settings.delta)
            if after > self.settings.epsilon:
                raise RunError(
                    f"privacy: the budget is spent (epsilon would be {after:.3g}, privacy.epsilon is"
                    f" {self.settings.epsilon:g})"
                )

    def protect(
        self, fields: Mapping[str, Tensor], schema: Schema, task: str, times: int = 1
    ) -> dict[str, Tensor]:
        """Return the reply as it may leave. A repeated reply is noised anew and so counted again."""
        counted = self.protection.releases(schema)
        with self.account.held():
            self.check(schema, task, times)
            if counted:
                # Before it leaves: a crash may count too much, never too little.
                self.account.write(self.account.with_more(self.protection.multiplier, times))
        out = self.protection.protect(fields, schema, task, secure_normal)
        if counted:
            self._report(schema)
        return out

    def _report(self, schema: Schema) -> None:
        spent = self.account.spent(self.settings.delta)
        bare = self.protection.unprotected(schema)
        aside = f"; not protected: {', '.join(bare)}" if bare else ""
        what = "pass" if self.settings.of_samples else "participation"
        print(
            f"privacy: {what} {spent['participations']:.0f}, epsilon {spent['epsilon/participation']:.4g}"
            f" alone and {spent['epsilon/client']:.4g} in all, delta {self.settings.delta:g}{aside}",
            file=sys.stderr,
            flush=True,
        )
