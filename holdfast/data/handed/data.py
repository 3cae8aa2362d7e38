"""holdfast.Data: data that is handed over in Python, with the settings of a config's data section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from operator import index
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from pydantic import BaseModel

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.memory import parse_bytes
from holdfast.core.notebook_figure import shown_in_notebooks
from holdfast.data.handed.content import HandedOver
from holdfast.data.handed.encode import Asked, Encoding, Layout
from holdfast.data.handed.entries import Reading, is_entry
from holdfast.data.handed.gather import check_names, gather_clients, gather_dataset
from holdfast.data.handed.kept import handed_in

if TYPE_CHECKING:
    from holdfast.data.federation import DataSettings, Federation

_SETTINGS = ("partition", "split", "pool", "root", "held_out")
_SHOWN_NAMES = 6


class Data:
    """Data from Python: one dataset that a partition divides, or one entry for each client.

    >>> run = holdfast.run(data=holdfast.Data(X, y, partition="dirichlet", clients=4))
    >>> run = holdfast.run(data=holdfast.Data(clients={"Berlin": (X0, y0), "Paris": (X1, y1)}))

    An entry is (X, y), (X, y, X_test, y_test), a torch Dataset, a Hugging Face Dataset or a pandas frame.
    Everything is read and checked at once; an error names the client.

    * X, y: samples and labels of one dataset; X alone if it is a Dataset or a frame.
    * clients: the number of clients, or their entries as a list or as a map of names.
    * test: the test set of the dataset, or a list or a map with one for each client.
    * users: whose each sample is, for partition="by-user".
    * names: names of the clients, for tables and pages.
    * label: column of the labels in datasets and frames; default: label, labels or target.
    * columns: columns of the samples there; default: all but the label.
    * classes: number of classes, or their names; default: those of all labels together.
    * kind: "images", "numbers" or "words"; "auto": bytes are images, rows of whole numbers are words.
    * layout: where images have their channels, "first" or "last"; "auto": last if only that side is 1, 3 or
      4.
    * words: number of words that are kept of a text.
    * normalise: "dataset" (mean and deviation of all training samples), "half", "none", or a pair of mean and
      deviation.
    * keep: whether run directories get a copy, so that a run can be resumed by its path alone: True, False,
      or up to a size such as "2GB".
    * title: name of the data in labels of a sweep; default: the beginning of its digest.
    * partition, split, pool, root, held_out: as in the data section of a config.
    """

    def __init__(
        self,
        X: Any = None,
        y: Any = None,
        *,
        clients: int | Sequence[Any] | Mapping[str, Any] | None = None,
        test: Any = None,
        users: Any = None,
        names: Sequence[str] | None = None,
        label: str | None = None,
        columns: Sequence[str] = (),
        classes: int | Sequence[str] | None = None,
        kind: Asked = "auto",
        layout: Layout = "auto",
        words: int = 128,
        normalise: Any = "dataset",
        keep: bool | str = "2GB",
        title: str | None = None,
        **settings: Any,
    ):
        _check_names_of(settings)
        how = _encoding(kind, layout, words)
        reading = Reading(label, (columns,) if isinstance(columns, str) else tuple(columns))
        self._settings = {name: given for name, given in settings.items() if given is not None}
        self._settings |= _normalising(normalise)
        self._keep, self._title = _limit(keep), title
        many = _number(clients)
        if clients is None or many is not None:
            gathered = gather_dataset(X, y, test, users, reading)
            named = check_names(names, many) or self._users(gathered.names, many)
            self._settings |= {} if many is None else {"clients": many}
        else:
            _check_alone(X, y, users, settings)
            gathered = gather_clients(clients, names, test, reading)
            named = gathered.names
            self._settings |= {
                "clients": len(gathered.train),
                "partition": {"name": "as-given"},
                "pool": "train",
            }
        self._settings |= {"names": list(named)} if named else {}
        self.settings()  # a misspelt setting is an error before the data is read
        self._content = gathered.content(classes, how)
        self._handed: HandedOver | None = None

    def _users(self, users: tuple[str, ...], clients: int | None) -> tuple[str, ...]:
        """The names of users as those of the clients, where each user is a client."""
        chosen = self._settings.get("partition")
        name = chosen.get("name") if isinstance(chosen, Mapping) else getattr(chosen, "name", chosen)
        return users if name == "by-user" and clients in (None, len(users)) else ()

    @property
    def samples(self) -> HandedOver:
        """The samples by their digest."""
        if self._handed is None:
            self._handed = HandedOver.of(self._content, self._keep)
        return self._handed

    @property
    def digest(self) -> str:
        """SHA-256 of all samples and labels."""
        return self.samples.digest

    def section(self) -> dict[str, Any]:
        """The data section of a config: only what was given, so that defaults stay those of the config."""
        return self._section(self.samples)

    def _section(self, samples: HandedOver | str) -> dict[str, Any]:
        options = {"samples": samples, **self._settings.get("options", {})}
        return {"name": "arrays", **self._settings, "options": options}

    def settings(self) -> DataSettings:
        """The data section, checked."""
        from holdfast.core.registry import INVALID, explain
        from holdfast.data.federation import DataSettings  # which accepts a Data itself

        try:
            return DataSettings(
                **self._section(self.samples if hasattr(self, "_content") else "not read yet")
            )
        except INVALID as error:
            raise ConfigError(explain(error, DataSettings, "data")) from None

    def federation(self, seed: int = 0) -> Federation:
        """Who holds what in a run with this seed."""
        from holdfast.core.keys import Key
        from holdfast.data.federation import build_federation

        return build_federation(self.settings(), Key(seed).fold("data"))

    def counts(self, part: str = "train", seed: int = 0) -> np.ndarray:
        """[clients, classes]: how many samples of each class every client has, for "train", "validation" or
        "test"."""
        if part not in ("train", "validation", "test"):
            raise ConfigError(f"part: train, validation or test, not '{part}'")
        table = getattr(self.federation(seed), part)
        return np.asarray(table.by_class(self._content.classes).numpy())

    def plot(self, part: str = "train", seed: int = 0, ax: Any = None) -> Any:
        """Draw who holds what, clients across and classes down, and return a matplotlib Figure.

        >>> data.plot().savefig("data.pdf")

        `ax` draws into axes of your own instead. matplotlib comes with `pip install 'holdfast[figures]'`."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError("Data.plot needs matplotlib; run pip install 'holdfast[figures]'") from None
        counts, names = self.counts(part, seed), self._settings.get("names", [])
        figure = shown_in_notebooks(Figure(layout="constrained")) if ax is None else ax.figure
        ax = figure.subplots() if ax is None else ax
        image = ax.imshow(counts.T, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
        figure.colorbar(image, ax=ax, label=f"{part} samples")
        ax.set(xlabel="client", ylabel="class")
        if names and len(names) <= 40:
            ax.set_xticks(range(len(names)), names, rotation=90)
        if self._content.class_names:
            ax.set_yticks(range(self._content.classes), self._content.class_names)
        return figure

    def __repr__(self) -> str:
        content = self._content
        tested = len(content.y) - content.train_rows
        shape = " x ".join(map(str, content.x.shape[1:]))
        kind = {"words": f"texts of {shape} words", "table": f"rows of {shape} numbers"}.get(
            content.kind, f"{'images' if content.x.ndim == 4 else content.kind} of {shape}"
        )
        own = f" and {tested:,} for testing" if tested else ""
        return (
            f"Data({self._who()}; {content.train_rows:,} samples{' for training' + own if own else ''},"
            f" {kind},"
            f" {content.classes} classes; digest {self.samples.short})"
        )

    @property
    def title(self) -> str:
        """The name of the data in labels of a sweep."""
        return self._title or f"arrays-{self.digest[:8]}"

    def _who(self) -> str:
        settings = self.settings()
        names, clients = self._settings.get("names", []), settings.known_clients
        if names:
            more = ", ..." if len(names) > _SHOWN_NAMES else ""
            return f"{len(names)} clients: {', '.join(names[:_SHOWN_NAMES])}{more}"
        many = "one client for each user" if clients is None else f"{clients} clients"
        own = self._settings.get("partition") == {"name": "as-given"}
        return many if own else f"{many}, partition {settings.partitioner().name}"


def data_of(given: Any) -> Data | None:
    """What a caller gives as data: a Data, a list of entries, or a map from names to entries; None where it
    is no data but settings, or something else."""
    if isinstance(given, Data):
        return given
    if is_entry(given) and not _are_entries(given):
        raise ConfigError(
            "data: this is one dataset; write data=holdfast.Data(X, y, clients=20, partition=...), or a"
            " list with one"
            " entry for each client"
        )
    if isinstance(given, (list, tuple)):
        return Data(clients=list(given))
    if not isinstance(given, Mapping) or not any(map(is_entry, given.values())):
        return None
    from holdfast.data.federation import DataSettings

    shared = [str(name) for name in given if name in DataSettings.model_fields]
    if shared:
        raise ConfigError(
            f"data: '{shared[0]}' is a setting of the data section and cannot be told from a client's"
            f" name; write"
            " data=holdfast.Data(clients=...), with settings beside it"
        )
    return Data(clients=given)


def section_of(given: Any) -> Any:
    """The data section of a config for what a caller gives: data that is handed over, the name of a
    dataset, or settings, which stay as they are."""
    if isinstance(given, str):
        return {"name": given}
    data = data_of(given)
    if data is not None:
        return data.section()
    if given is None or isinstance(given, (Mapping, BaseModel)):
        return given
    raise ConfigError(
        f"data: cannot read a {type(given).__name__}; give a list with one entry (X, y) for each client,"
        f" a map from"
        " names to entries, holdfast.Data(X, y, clients=20), the name of a dataset, or settings"
    )


def handed_again(given: Any) -> list[HandedOver]:
    """The samples of data that is given again for a run: as it was given first, or a list of several Data."""
    if given is None:
        return []
    several = isinstance(given, (list, tuple)) and bool(given) and all(isinstance(one, Data) for one in given)
    found = [data_of(one) for one in (given if several else [given])]
    if any(one is None for one in found):
        raise ConfigError("data: give the same arrays again, or a holdfast.Data of them")
    return [one.samples for one in found if one is not None]


def merged(there: Any, given: Any) -> tuple[Any, Any]:
    """Both as sections that can be laid over each other, key by key. Data that is handed over takes the
    place of other data that was handed over, with everything that belongs to it."""
    there, given = section_of(there), section_of(given)
    if handed_in({"data": given}) and isinstance(there, Mapping):
        if handed_in({"data": there}):
            return {}, given
        there = {name: value for name, value in there.items() if name not in ("name", "options", "dir")}
    return there, given


def _are_entries(given: Any) -> bool:
    """Whether a list of 2 or 4 is a list of entries, rather than one entry. One tuple (X, y) in it is enough:
    the error about another that cannot be read then names its client."""
    if not isinstance(given, (list, tuple)):
        return False
    return all(map(is_entry, given)) or any(isinstance(one, tuple) and is_entry(one) for one in given)


def _check_names_of(settings: Mapping[str, Any]) -> None:
    """Refuse arguments that do not exist."""
    for name in settings:
        if name not in _SETTINGS:
            known = [*_SETTINGS, *(word for word in signature(Data.__init__).parameters if word != "self")]
            raise ConfigError(f"holdfast.Data has no argument '{name}'{suggest(name, known)}")


def _number(clients: Any) -> int | None:
    """The number of clients, if that is what was given."""
    if clients is None or isinstance(clients, (list, tuple, Mapping)):
        return None
    try:
        return index(clients)
    except TypeError:
        raise ConfigError(
            f"clients: give their number, a list of entries or a map of names, not a {type(clients).__name__}"
        ) from None


def _check_alone(X: Any, y: Any, users: Any, settings: Mapping[str, Any]) -> None:
    if X is not None or y is not None or users is not None:
        raise ConfigError(
            "holdfast.Data(clients=[...]) takes no X, y and users: each entry has its own samples"
        )
    for name in ("partition", "pool"):
        if settings.get(name) is not None:
            raise ConfigError(
                f"{name}: the clients hold what is given for them; to divide one dataset, write"
                f" holdfast.Data(X, y,"
                " partition=...)"
            )


def _encoding(kind: str, layout: str, words: int) -> Encoding:
    for name, given, known in (("kind", kind, get_args(Asked)), ("layout", layout, get_args(Layout))):
        if given not in known:
            raise ConfigError(f"{name}: '{given}' is none of {', '.join(known)}")
    if words < 1:
        raise ConfigError(f"words: {words} is too few; keep at least 1 word of a text")
    return Encoding(kind, layout, words)  # type: ignore[arg-type]


def _normalising(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        return {} if given == "dataset" else {"options": {"normalise": given}}
    try:
        mean, std = (tuple(float(x) for x in np.atleast_1d(np.asarray(part))) for part in given)
    except (TypeError, ValueError):
        raise ConfigError(
            'normalise: give "dataset", "half", "none", or a pair of mean and deviation'
        ) from None
    return {"options": {"shift": mean, "scale": std}}


def _limit(keep: bool | str) -> int:
    if isinstance(keep, bool):
        return 2**62 if keep else 0
    return parse_bytes(keep, "keep")
