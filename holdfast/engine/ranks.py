"""The processes that run one experiment together, by torch.distributed: how they start, what they send each
other, and what is said when one of them ends or does not answer.

Everything travels as bytes: numbers of any type, and plain data as JSON. Nothing is pickled."""

from __future__ import annotations

import atexit
import json
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from holdfast.core.columns import OneRank, Ranks
from holdfast.core.errors import ConfigError, RunError
from holdfast.engine.workers import usable_cores

T = TypeVar("T")

SWITCH = "HOLDFAST_RANKS"
"""The environment variable that says whether processes that another launcher than torchrun started run one
experiment together: 1; with 0, not even those of torchrun do."""
SOCKET = "HOLDFAST_RANK_SOCKET"
"""The environment variable by which `--devices` hands the first rank an open socket on the loopback address;
torch.distributed itself would listen on all addresses."""
LIMIT = "HOLDFAST_RANK_TIMEOUT"
"""The environment variable with the seconds for which a rank waits for the others."""
_SECONDS = 1800.0
DEVICE = "HOLDFAST_RANK_DEVICE"
"""The environment variable by which `--devices` gives each rank its device."""
_SHARED_GPU = "HOLDFAST_SHARE_GPU"
"""Set where several ranks may use one GPU; what they exchange then goes through the host."""


class RankLost(RunError):
    """Another process of the run has ended, or does not answer."""


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, and which of those of its machine."""

    rank: int
    count: int
    local_rank: int
    local_count: int


def place() -> Place | None:
    """This process's place among those that torchrun, or `--devices`, started; None where nobody did. Other
    launchers set the same variables for other ends, so with them `HOLDFAST_RANKS=1` asks for it."""
    env = os.environ
    asked = env.get(SWITCH, "1" if "TORCHELASTIC_RUN_ID" in env else "0")
    if asked != "1" or "RANK" not in env or "WORLD_SIZE" not in env or "MASTER_ADDR" not in env:
        return None
    try:
        rank, count = int(env["RANK"]), int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_RANK", rank))
        found = Place(rank, count, local, int(env.get("LOCAL_WORLD_SIZE", count)))
    except ValueError:
        raise ConfigError(
            "RANK, WORLD_SIZE and LOCAL_RANK must be numbers; start the run with torchrun"
        ) from None
    if not 0 <= found.rank < found.count or not 0 <= found.local_rank < found.local_count:
        raise ConfigError(f"RANK {found.rank} of WORLD_SIZE {found.count}: ranks are numbered from 0")
    return found


class TorchRanks:
    """The ranks of a process group. Every method is called by all of them, in the same order."""

    def __init__(self, at: Place, seconds: float):
        self.rank, self.count, self.place = at.rank, at.count, at
        self._seconds = seconds
        self._gpus: Any = None
        """The group by which tensors on GPUs travel; False where they go through the host."""

    def gather(self, value: Tensor) -> list[Tensor]:
        """What every rank has; all agree first on how large each part is."""
        shapes = self.agree(list(value.shape))
        sizes = [_bytes(shape, value) for shape in shapes]
        mine = self._there(_as_bytes(value))
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=mine.device)
        padded[: sizes[self.rank]] = mine
        found = [torch.empty_like(padded) for _ in sizes]
        self._do(lambda dist: dist.all_gather(found, padded, group=self._of(padded)))
        return [
            _of_bytes(part[:size].to(value.device), value.dtype, shape)
            for part, size, shape in zip(found, sizes, shapes, strict=True)
        ]

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """One all-to-all; what each rank sent here."""
        like = parts[0]
        shapes = self.agree([list(part.shape) for part in parts])
        coming = [of_rank[self.rank] for of_rank in shapes]
        sizes = [_bytes(shape, like) for shape in coming]
        sent = self._there(torch.cat([_as_bytes(part) for part in parts]))
        found = torch.empty(sum(sizes), dtype=torch.uint8, device=sent.device)
        going = [part.numel() * part.element_size() for part in parts]
        self._do(lambda dist: dist.all_to_all_single(found, sent, sizes, going, group=self._of(sent)))
        return [
            _of_bytes(part.to(like.device), like.dtype, shape)
            for part, shape in zip(found.split(sizes), coming, strict=True)
        ]

    def fold(self, start: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """From rank to rank in their order, then from the last one to all."""
        so_far = start.contiguous()
        box = self._there(_as_bytes(so_far).clone())
        if self.rank:
            self._do(lambda dist: dist.recv(box, self.rank - 1, group=self._of(box)))
            so_far = _of_bytes(box.to(start.device), start.dtype, list(start.shape))
        mine = add(so_far)
        box = self._there(_as_bytes(mine).clone())
        if self.rank + 1 < self.count:
            self._do(lambda dist: dist.send(box, self.rank + 1, group=self._of(box)))
        self._do(lambda dist: dist.broadcast(box, self.count - 1, group=self._of(box)))
        return _of_bytes(box.to(start.device), mine.dtype, list(mine.shape))

    def agree(self, mine: Any) -> list[Any]:
        """What every rank says. A rank that has ended, or that does not come within the time limit, is named
        here."""
        self._meet()
        said = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        self._do(lambda dist: dist.all_gather(sizes, torch.tensor([len(said)])))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(said)] = said
        found = [torch.empty_like(padded) for _ in sizes]
        self._do(lambda dist: dist.all_gather(found, padded))
        return [
            json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(found, sizes, strict=True)
        ]

    def _meet(self) -> None:
        """Wait until all are here. The first rank can name one that is not."""
        self._do(lambda dist: dist.monitored_barrier(timeout=timedelta(seconds=self._seconds)))

    def _there(self, value: Tensor) -> Tensor:
        """A tensor where the ranks can send it: NCCL needs a GPU for each of them."""
        if not value.is_cuda:
            return value.cpu()
        if self._gpus is None:
            self._gpus = self._group_of_gpus(value.device)
        return value if self._gpus else value.cpu()

    def _group_of_gpus(self, device: torch.device) -> Any:
        import torch.distributed as dist

        mine = [
            socket.gethostname(),
            str(torch.cuda.get_device_properties(device).uuid),
            dist.is_nccl_available(),
        ]
        said = self.agree(mine)
        apart = len({(host, gpu) for host, gpu, _ in said}) == self.count
        if not apart or not all(able for _, _, able in said):
            return False
        torch.cuda.set_device(device)
        return dist.new_group(backend="nccl", timeout=timedelta(seconds=self._seconds))

    def _of(self, value: Tensor) -> Any:
        """The group by which a tensor travels; None is that of the host's memory."""
        return self._gpus if value.is_cuda else None

    def _do(self, work: Callable[[Any], Any]) -> None:
        import torch.distributed as dist

        try:
            work(dist)
        except RuntimeError as error:
            if os.environ.get("HOLDFAST_DEBUG"):
                raise
            raise RankLost(_who(str(error), self._seconds)) from None


def _who(text: str, seconds: float) -> str:
    """One line for an error of torch.distributed: which rank is missing, where that is known."""
    head = text.split("Rank ", 2)
    who = "another rank"
    if "failed to pass monitoredBarrier" in text and len(head) > 2:
        who = f"rank {head[2].split()[0]}"
    closed = "Connection closed" in text or "Connection reset" in text or "Broken pipe" in text
    what = "has ended" if closed else f"has not answered for {seconds:g} s ({LIMIT})"
    return f"{who} {what}; `holdfast resume` goes on from the last committed round"


def _bytes(shape: Sequence[int], like: Tensor) -> int:
    count = like.element_size()
    for size in shape:
        count *= size
    return count


def _as_bytes(value: Tensor) -> Tensor:
    flat = value.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _of_bytes(flat: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not flat.numel():
        return torch.empty(*shape, dtype=dtype, device=flat.device)
    return flat.clone().view(dtype).reshape(*shape)


def wait_limit() -> float:
    """Seconds for which a rank waits for the others."""
    text = os.environ.get(LIMIT, str(_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 10**7:
        raise ConfigError(f"{LIMIT} is {text!r}; give it a number of seconds, such as 600")
    return seconds


def rank_device(name: str, at: Place) -> str:
    """The device of a rank: what `--devices` gave it, or one GPU for each rank of a machine."""
    if DEVICE in os.environ:
        return os.environ[DEVICE]
    if name.startswith("cuda:") and at.local_count > 1:
        raise ConfigError(
            f"engine.device: {at.local_count} ranks of this machine cannot all train on {name}; write cuda,"
            " so that each has a GPU of its own"
        )
    if name != "cuda":
        return name
    found = torch.cuda.device_count()
    if at.local_count > found and not os.environ.get(_SHARED_GPU):
        raise ConfigError(
            f"{at.local_count} ranks on a machine with {found} GPUs; start one for each, or set"
            f" {_SHARED_GPU}=1 to let several share one"
        )
    return f"cuda:{at.local_rank % max(1, found)}"


def here() -> Ranks | None:
    """The ranks that were started together with this one, joined once in the life of a process; None where
    this process runs alone."""
    at = place()
    if at is None:
        return None
    if at.count == 1:
        return OneRank()
    if _JOINED:
        return _JOINED[0]
    import torch.distributed as dist

    seconds = wait_limit()
    # processes of one machine share its cores
    torch.set_num_threads(max(1, usable_cores() // at.local_count))
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed was started in this process already; Holdfast starts it itself, so leave"
            f" init_process_group out, or set {SWITCH}=0 to run an experiment in each process"
        )
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds), **_meeting_point(at, seconds))
    except (RuntimeError, ValueError) as error:
        raise RunError(f"rank {at.rank} cannot reach the others: {str(error).splitlines()[0]}") from error
    if at.rank:
        warnings.simplefilter("ignore")  # the first rank gives the same warnings
    atexit.register(dist.destroy_process_group)
    _JOINED.append(TorchRanks(at, seconds))
    return _JOINED[0]


_JOINED: list[TorchRanks] = []


def _meeting_point(at: Place, seconds: float) -> dict[str, Any]:
    """Where the ranks find each other: for those of `--devices` by a socket that is open already."""
    if SOCKET not in os.environ:
        return {}
    from torch.distributed import TCPStore

    first: dict[str, Any] = (
        {"is_master": True, "master_listen_fd": int(os.environ[SOCKET])} if at.rank == 0 else {}
    )
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        at.count,
        timeout=timedelta(seconds=seconds),
        use_libuv=True,
        **first,
    )
    return {"store": store, "rank": at.rank, "world_size": at.count}


def alone_only(what: str) -> None:
    """Refuse what several processes cannot run together."""
    if place() is not None:
        raise ConfigError(
            f"torchrun runs one experiment on several processes, not {what}; `holdfast sweep --devices all`"
            f" or `--ray` use several devices ({SWITCH}=0 in the environment lets each process run its own)"
        )


def follows() -> bool:
    """Whether this process runs an experiment together with others, of which another one reports."""
    at = place()
    return at is not None and at.rank > 0


def on_first(ranks: Ranks | None, work: Callable[[], Any]) -> Any:
    """Let the first rank do what one process has to do; its error is that of all. What it returns has to be
    plain data. Without ranks, this process does it."""
    if ranks is None:
        return work()
    answer: dict[str, Any] = {}
    raised: Exception | None = None
    if ranks.rank == 0:
        try:
            answer = {"found": work()}
        except Exception as error:
            raised, answer = error, _told(error)
    answer = ranks.agree(answer)[0]
    if raised is not None:
        raise raised
    return answer.get("found") if "error" not in answer else _raise(answer, 0)


def on_all(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """Let every rank do the same; an error of one of them is that of all."""
    if ranks is None:
        return work()
    found, error = None, None
    try:
        found = work()
    except Exception as raised:
        error = raised
    all_well(ranks, error)
    return cast(T, found)


def all_well(ranks: Ranks, error: Exception | None) -> None:
    """Tell the others of an error of this rank, or learn of theirs: then all end, and the first rank says
    whose it was."""
    answers = ranks.agree({} if error is None else _told(error))
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if "error" in answer:
            _raise(answer, rank)


def _told(error: Exception) -> dict[str, str]:
    return {"error": str(error) or type(error).__name__, "kind": type(error).__name__}


def _raise(answer: dict[str, str], rank: int) -> NoReturn:
    kind = ConfigError if answer["kind"] == ConfigError.__name__ else RunError
    raise kind(f"rank {rank}: {answer['error']}")
