"""The base class of attacks: hooks on the data and on the replies of malicious clients, with a declared and
enforced view of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor

from holdfast.aggregators.geometry import everywhere
from holdfast.attacks.false_numbers import Lie
from holdfast.attacks.memory import Memory
from holdfast.attacks.moving_trigger import MovingTrigger
from holdfast.attacks.target import Target, Trial
from holdfast.core.columns import Reads, current
from holdfast.core.errors import RunError
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import Part, setting
from holdfast.core.types import Kind, Schema, Uplink
from holdfast.data.federation import Federation, Samples

if TYPE_CHECKING:
    from holdfast.attacks.several import Views

Knowledge = Literal["own", "colluders", "everyone", "defence"]
Whom = Literal["all", "benign"]
REACH = {"own": 0, "colluders": 1, "everyone": 2, "defence": 3}


@dataclass(frozen=True)
class View:
    """What the attackers see of a round: always their own honest replies; more only where the attack declares
    that it knows more."""

    mine: Tensor
    """Positions of the malicious clients among the rows of `up`."""
    up: Uplink
    """Honest replies: those of all clients where the attack knows everyone, else only the attackers'."""
    knows: Knowledge
    cohort: int = 0
    """How many clients answer. Taken to be public: the papers' attacks scale by it."""
    sent: Callable[[], Tensor | None] = lambda: None
    """Returns the models that the attackers were sent, one row each; None where no model was sent. Where
    several processes share the updates, it has the columns of the updates."""
    notes: list[str] = field(default_factory=list)
    round: int = 0
    """Counted from 1; every client can count rounds."""
    lasting: Key = field(default_factory=lambda: Key(0))
    """A key that is the same in all rounds and for all attackers: for what they agree on before the run."""
    target: Target = field(default_factory=Target)
    """What they know of what they attack, beside what is sent."""
    trained_by_them: Uplink | None = None
    """What the attackers' own training left, one row each, where they had one (own_training.py)."""
    memory: Memory = field(default_factory=Memory)

    def own(self, field: str) -> Tensor:
        """The attackers' honest rows: a single one where the attack knows only its own."""
        return self.up[field][self.mine]

    def trained(self, field: str) -> Tensor | None:
        """The attackers' rows as their own training left them; None where they did not train by themselves,
        or not for this field."""
        return None if self.trained_by_them is None else self.trained_by_them.fields.get(field)

    def recall(self, name: str) -> Tensor | None:
        """What these attackers remembered under this name; None where nothing was."""
        return self.memory.recall(name)

    def remember(self, name: str, value: Tensor, columns: bool = False) -> None:
        """Remember a tensor for later rounds. `columns`: its last axis is that of the updates."""
        self.memory.remember(name, value, columns)

    def colluders(self, field: str) -> Tensor:
        self._need("colluders")
        return self.up[field][self.mine]

    def everyone(self, field: str) -> Tensor:
        """All clients' honest rows."""
        self._need("everyone")
        return self.up[field]

    def known(self, field: str, whom: Whom = "all") -> Tensor:
        """Honest rows to take statistics of: of all clients or of the benign ones. Colluders who know only
        each other take their own for a sample of the others, which is FedCAP's partial knowledge; so do
        attackers who are alone in a cohort. A client whose training diverged is left out, as the server will
        leave it out: else it would make what all attackers send not finite."""
        self._need("colluders")
        others = torch.ones(len(self.up), dtype=torch.bool)
        others[self.mine] = False
        rows = self.up[field] if whom == "all" or not bool(others.any()) else self.up[field][others]
        finite = _finite(rows)
        return rows[finite] if bool(finite.any()) and not bool(finite.all()) else rows

    def layout(self, field: str) -> Layout:
        """Where the tensors of the network lie among the numbers of a row: every client knows the network.
        One tensor where no model is sent."""
        shared = current()
        return self.target.layout_of(self.up[field].shape[1] if shared is None else shared.total)

    def trial(self, field: str, key: Key) -> Trial:
        """The server's rule, to be tried out on what all clients send with rows of the attackers' choice.
        Benign updates that are not finite are left out, as the server will leave them out."""
        if self.knows != "defence":
            raise RunError(
                f"attack tries the server's rule but declares to know only {self.knows}; set attack.knows ="
                ' "defence"'
            )
        rule = self.target.rule
        if rule is None:
            raise RunError("attack tries the server's rule, but its Adversary was not given one (target)")
        attackers = torch.zeros(len(self.up), dtype=torch.bool)
        attackers[self.mine] = True
        used, received = attackers | _finite(self.up[field]), self.sent()
        return Trial(
            rule,
            self.layout(field),
            self.up.only(used),
            field,
            attackers[used].nonzero().flatten(),
            None if received is None else received[0, : self.up[field].shape[1]],
            key,
            self.round,
        )

    def note(self, text: str) -> None:
        """Something a reader of the result should know. It goes into the round's record; the server does not
        see it."""
        self.notes.append(text)

    def _need(self, level: Knowledge) -> None:
        if REACH[self.knows] < REACH[level]:
            raise RunError(
                f"attack reads what {level} sent but declares to know only {self.knows}; set attack.knows ="
                f' "{level}"'
            )


def _finite(rows: Tensor) -> Tensor:
    """bool per row, on the host: whether all columns of all processes are finite."""
    return everywhere(
        torch.isfinite(rows.flatten(1).amin(1)) & torch.isfinite(rows.flatten(1).amax(1))
        if rows.numel()
        else torch.ones(0 if current() is None else len(rows), dtype=torch.bool, device=rows.device)
    ).cpu()


class Trigger(NamedTuple):
    """What makes a poisoned model answer `target`: `stamp` puts it into samples [n, ...] as they are
    stored."""

    stamp: Callable[[Tensor], Tensor]
    target: int
    inclusive: bool
    """Whether samples that show the target anyway count as successes."""
    among: Tensor | None = None
    """Which rows of the store are tested with it, one bool for each; none: all."""


class Attack(Part):
    """Changes what malicious clients train on (`data`) or send (`uplink`). The default does nothing."""

    tasks: ClassVar[frozenset[str] | None] = frozenset({"train"})
    """To which requests the replies are changed; none: to all that ask for a field of its kinds."""
    kinds: ClassVar[frozenset[str]] = frozenset({"update"})
    """Which fields it changes. One that changes updates is made on class means, too, where a method sends
    nothing else."""
    least: ClassVar[Knowledge] = "own"
    """The least it must know."""
    reads: ClassVar[Reads] = "rows"
    """How it reads the updates where several processes share them (core/columns.py). What is not "rows" is
    handed columns of all updates, returns these columns of what is sent, and asks about lengths and products
    through `geometry` and random numbers through `shared_rows` only."""
    fraction: float = setting(0.3, "share of the clients that are malicious", ge=0, le=1)
    clients: tuple[int | str, ...] | None = setting(
        None, "the malicious clients by number or name, instead of a share"
    )
    redraw: bool = setting(
        False, "draw the malicious clients anew in every round; else one set for the whole run"
    )
    knows: Knowledge = setting("own", "what the attackers see: own, colluders, everyone, defence")
    lies: dict[Kind, Lie] = setting(
        {},
        'how else attackers lie, by kind of field: a factor, "invert" or "random", as in { count = 10.0,'
        ' score = "invert" }',
    )
    claims: dict[Kind, float] = setting(
        {}, "constants that attackers send instead, by kind of field: { score = 1.0 }"
    )

    features: bool = setting(
        False,
        "attack class means (prototypes) like updates; done anyway where a method sends them and no update",
    )

    @model_validator(mode="after")
    def _sound(self) -> Attack:
        if REACH[self.knows] < REACH[self.least]:
            raise ValueError(
                f'\'{self.name}\' needs more than knows = "{self.knows}"; set knows = "{self.least}" or more'
            )
        if self.clients is not None and self.fraction != type(self).model_fields["fraction"].default:
            raise ValueError("clients names who attacks, fraction says how many; leave one of the two out")
        if self.redraw and self.clients is not None:
            raise ValueError(
                "redraw draws other clients every round, but clients names them; leave one of the two out"
            )
        return self

    def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
        """The federation with other training tables for malicious clients. Changed inputs are scratch rows
        appended to `samples`; the rows that were there, and all other tables, stay as they are."""
        return federation

    def round_data(
        self, federation: Federation, malicious: Tensor, key: Key, round: int
    ) -> Federation | None:
        """The same for one round, for an attack that changes with the rounds; only labels then. None: what
        `data` gave stays."""
        return None

    def planted(self, samples: Samples) -> Trigger | None:
        """The trigger, for attacks that plant one. Plug-ins of earlier versions call this method
        `trigger`."""
        old = getattr(type(self), "trigger", None)
        return old(self, samples) if callable(old) else None

    def moving(self, samples: Samples) -> MovingTrigger | None:
        """The trigger, for attacks that train one from round to round (moving_trigger.py)."""
        return None

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        """New rows [number of attackers, ...] for some fields; `up` has the attackers' honest replies, `view`
        whatever else they know. Where they know only their own, it is called for one attacker at a time. A
        single row is sent by all of them."""
        return {}

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor] | None:
        """What `uplink` returns, for several experiments at once: new rows [experiments, attackers, ...] for
        some fields, or [experiments, 1, ...] where all attackers of an experiment send the same. The
        experiments have the same settings and equal numbers of clients and attackers. None: they are computed
        one after the other."""
        return None

    def structure(self) -> tuple[str, ...]:
        """What attackers do on their clients, by their own training or by a trigger, is the same where this
        is equal: then they may do it as one stack."""
        own = {name: value for name, value in self.settings().items() if name not in Attack.model_fields}
        return type(self).__module__, type(self).__qualname__, repr(own)

    @classmethod
    def has_batched_form(cls) -> bool:
        """Whether `together` computes the same as `uplink`: a class that changes only `uplink` has none."""
        order = [name for base in cls.__mro__ for name in ("together", "uplink") if name in vars(base)]
        return cls.together is not Attack.together and order[0] == "together"

    def targets(self, schema: Schema) -> list[str]:
        """The fields of a reply that are of its kinds."""
        return [name for name, field in schema.items() if field.kind in self.kinds]

    def features_in(self, schema: Schema) -> list[str]:
        """The class means of a reply that are attacked like updates; an attack that names features among its
        kinds handles them itself."""
        wanted = self.features or not any(field.kind == "update" for field in schema.values())
        mine = "update" in self.kinds and "feature" not in self.kinds
        return [name for name, field in schema.items() if field.kind == "feature" and wanted and mine]
