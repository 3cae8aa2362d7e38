"""What a user asks SLURM for, read from one text: "partition=gpu gpus=8 time=02:00:00".

Words are separated by spaces, as in a shell, so a value with spaces is quoted. Names are those of `sbatch`,
with `-` or `_`; some are Holdfast's own. Everything is checked here, before anything is written or
submitted."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from holdfast.core.errors import ConfigError, suggest

EXAMPLE = "partition=gpu gpus=8 time=02:00:00"
OWN = ("gpus", "jobs", "cpus", "time", "requeues", "setup")
PASSED_ON = (
    "account",
    "begin",
    "clusters",
    "comment",
    "constraint",
    "deadline",
    "dependency",
    "exclude",
    "gres",
    "job_name",
    "licenses",
    "mail_type",
    "mail_user",
    "mem",
    "mem_per_cpu",
    "mem_per_gpu",
    "network",
    "nice",
    "nodelist",
    "partition",
    "prefer",
    "priority",
    "qos",
    "reservation",
    "switches",
    "tmp",
    "wckey",
)
"""Options of sbatch that say where, when and with how much memory a job runs."""
FLAGS = ("contiguous", "exclusive", "hold")
"""Options of sbatch that need no value."""
SET_HERE = {
    "array": "jobs=N sets how many elements the array has",
    "nodes": "every element of the array is one process on one node",
    "ntasks": "jobs=N sets how many processes share the sweep",
    "ntasks_per_node": "every element of the array is one process",
    "gpus_per_node": "gpus=N sets how many GPUs work at the same time, one for each element",
    "gpus_per_task": "gpus=N sets how many GPUs work at the same time, one for each element",
    "output": "logs are in the folder `slurm` of the sweep",
    "error": "logs are in the folder `slurm` of the sweep",
    "export": "the script holds no variables, because they may be secrets; set them in your shell",
    "chdir": "the elements run where you submit",
    "requeue": "elements are always queued again; requeues=N limits how often after their time limit",
    "signal": "submitit sets it, so that an element is queued again before its time ends",
}
_SAME = {"name": "job_name", "cpus_per_task": "cpus", "cpus_per_gpu": "cpus"}
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True)
class SlurmRequest:
    """What was asked for. `gpus` is how many elements work at the same time, each with one GPU; 0 means that
    no element has one. `options` are options of sbatch."""

    minutes: int
    gpus: int = 0
    gpu_type: str = ""
    jobs: int | None = None
    cpus: int | None = None
    requeues: int = 10
    setup: str = ""
    options: dict[str, str | bool] = field(default_factory=dict)

    def elements(self, cells: int) -> int:
        """Return how many elements the array has for so many cells."""
        return max(1, min(self.jobs or self.gpus or 1, cells))


def read_request(text: str) -> SlurmRequest:
    """Read and check the text."""
    given = _words(text)
    if "time" not in given:
        raise _wrong("time is missing: how long an element may run before it is queued again")
    gpu_type, _, gpus = str(given.get("gpus", "0")).rpartition(":")
    request = SlurmRequest(
        minutes=read_minutes(str(given["time"])),
        gpus=_number("gpus", gpus, 0),
        gpu_type=gpu_type,
        jobs=_number("jobs", str(given["jobs"]), 1) if "jobs" in given else None,
        cpus=_number("cpus", str(given["cpus"]), 1) if "cpus" in given else None,
        requeues=_number("requeues", str(given.get("requeues", "10")), 0),
        setup=str(given.get("setup", "")),
        options={name: value for name, value in given.items() if name not in OWN},
    )
    if request.jobs is not None and request.jobs < request.gpus:
        raise _wrong(
            f"jobs={request.jobs} uses only {request.jobs} of {request.gpus} GPUs, one for each element;"
            f" write gpus={request.jobs}, or more jobs"
        )
    return request


def read_minutes(text: str) -> int:
    """Read a time as sbatch does: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. Seconds are rounded
    up to a minute."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise _wrong(f"time={text} is not a time; write HH:MM:SS, D-HH:MM or minutes")
    first, second, third = (int(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is not None:
        seconds = 86400 * int(found["days"]) + 3600 * first + 60 * second + third
    elif found["third"] is not None:
        seconds = 3600 * first + 60 * second + third
    else:
        seconds = 60 * first + second
    if not 0 < seconds <= 366 * 86400:
        raise _wrong(f"time={text} must be more than nothing and at most a year")
    return -(-seconds // 60)


def _words(text: str) -> dict[str, str | bool]:
    """Return every setting by its name, each checked to be one that may be given."""
    try:
        words = shlex.split(text)
    except ValueError:
        raise _wrong("a quotation mark has no partner") from None
    if not words:
        raise _wrong("nothing is asked for")
    given: dict[str, str | bool] = {}
    for word in words:
        said, equals, value = word.partition("=")
        name = said.lstrip("-").replace("-", "_")
        name = _SAME.get(name, name)
        _check(said, name, bool(equals), value)
        if name in given:
            raise _wrong(f"{said} is given twice")
        given[name] = value if equals else True
    return given


def _check(said: str, name: str, has_value: bool, value: str) -> None:
    if name in SET_HERE:
        raise _wrong(f"{said} cannot be set: {SET_HERE[name]}")
    if name not in (*OWN, *PASSED_ON, *FLAGS):
        raise _wrong(f"unknown setting '{said}'{suggest(name, (*OWN, *PASSED_ON, *FLAGS))}")
    if name not in FLAGS and not value:
        raise _wrong(f"{said} needs a value, as in {said}=...")
    if has_value and not value.isprintable():
        raise _wrong(f"the value of {said} must be one line of printable text")
    if name != "setup" and re.search(r",\s*[a-z_-]+=", value):
        raise _wrong(f"{said}={value}: separate settings by spaces, not by commas")


def _number(name: str, text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,5}", text) or int(text) < least:
        raise _wrong(f"{name}={text} must be a whole number of at least {least}")
    return int(text)


def _wrong(said: str) -> ConfigError:
    return ConfigError(f'slurm: {said}; for example "{EXAMPLE}"')
