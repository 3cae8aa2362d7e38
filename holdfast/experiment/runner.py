"""Running experiments together: under which terms, and how they are driven. Both runs and sweeps use this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.core.device import deterministic_math
from holdfast.core.errors import ConfigError, RunError
from holdfast.engine.host_threads import host_threads
from holdfast.engine.lockstep import Engine, RunDriver, drive
from holdfast.engine.workers import usable_cores
from holdfast.experiment.loop import Experiment
from holdfast.experiment.manifest import digest_of
from holdfast.experiment.planner import pick_device, plan_together, sentence
from holdfast.local.plan import Plan, on_threads
from holdfast.storage.status import write_failure

Say = Callable[[str], None]
MakeEngine = Callable[[Mapping[str, Plan], torch.device], Engine]
"""Makes what answers the exchanges of a run: the simulator, or a Flower server with real clients."""


@dataclass
class RunCallbacks:
    """How a caller follows a run: `say` gets lines worth printing, `moved` is called as experiments go on."""

    say: Say = lambda line: None
    moved: Callable[[Experiment], None] = lambda experiment: None
    planned: Callable[[list[Experiment]], None] = lambda experiments: None
    tell_cost: bool = True
    """Whether to say what the trial of a plan says about the cost of the run. A forecast measures this
    better, and one command should not print two numbers for one thing."""


@dataclass(frozen=True)
class RunTerms:
    """What the bits of experiments that run together depend on, besides their configs; one plan for each."""

    plans: tuple[Plan, ...]
    threads: int
    device: str


def agree(experiments: list[Experiment], device: str, watch: RunCallbacks, may_fork: bool = True) -> RunTerms:
    """Choose by trial how these experiments are trained together, and report the choice."""
    threads, forecasts = plan_together(
        experiments, pick_device(device), experiments[0].config.engine.threads, may_fork
    )
    for name, forecast in forecasts.items():
        mine = [e for e in experiments if e.run_context.plan_key == name]
        watch.say(sentence(forecast, mine, threads, watch.tell_cost))
    return RunTerms(tuple(forecasts[e.run_context.plan_key].plan for e in experiments), threads, device)


def choose_device(out: Path, asked: str | None, began: str) -> torch.device:
    """The device on which a run began, unless another is asked for."""
    try:
        return pick_device(asked or began)
    except ConfigError as error:
        raise (
            error
            if asked
            else RunError(
                f"{out} began on {began}, which this machine does not have; --device cpu continues, with"
                " other bits"
            )
        ) from None


def say_torch(began: str | None, watch: RunCallbacks) -> None:
    if began != torch.__version__:
        watch.say(f"began under PyTorch {began}, continues under {torch.__version__}: the bits may differ")


def check_same(experiment: Experiment, manifest: Mapping[str, Any]) -> None:
    """Refuse to go on where data or start weights are not those that the run began with."""
    if experiment.federation.digest != manifest["partition"]:
        raise RunError(
            f"{experiment.out}: the data has changed since the run began (clients hold other samples)"
        )
    if manifest.get("samples", experiment.federation.samples.digest) != experiment.federation.samples.digest:
        raise RunError(f"{experiment.out}: the data has changed since the run began (the samples differ)")
    if digest_of(experiment.initial) != manifest["initial"]:
        raise RunError(f"{experiment.out}: the model does not start from the weights the run began with")


def _host_threads(device: torch.device, terms: RunTerms, experiments: int) -> int:
    """Threads for the CPU work of many experiments, where the CPU does not train. Where the servers compute
    on the GPU, little of that work is left, and it is Python's, which threads do not share."""
    on_gpu = any(home_of(plan, device).type != "cpu" for plan in terms.plans)
    alone = device.type != "cuda" or terms.threads > 1 or experiments == 1 or on_gpu
    return 1 if alone else usable_cores()


def home_of(plan: Plan, device: torch.device) -> torch.device:
    """Where what clients send is kept, and where servers compute."""
    return device if plan.server == "device" else torch.device("cpu")


def run_together(
    experiments: list[Experiment],
    terms: RunTerms,
    make_engine: MakeEngine,
    watch: RunCallbacks,
    contain: bool = True,
) -> list[RunDriver]:
    """Run experiments whose locks are held to their ends. With `contain`, an experiment that fails leaves a
    note in its folder and the others go on."""
    device = pick_device(terms.device)
    by_context = {id(e.run_context): e for e in experiments}
    drivers = [RunDriver(e.run_context, e.steps()) for e in experiments]

    def note(driver: RunDriver) -> None:
        if contain and driver.error is not None:
            experiment = by_context[id(driver.run_context)]
            write_failure(experiment.out, driver.run_context.round, driver.error)
            watch.say(f"{experiment.label} failed in round {driver.run_context.round}; the others go on")

    homes = {home_of(plan, device) for plan in terms.plans}
    with ExitStack() as context:
        context.enter_context(on_threads(terms.threads))
        context.enter_context(host_threads(_host_threads(device, terms, len(experiments))))
        for home in homes:
            context.enter_context(deterministic_math(home, "fp32"))  # what servers compute is never rounded
        engine = make_engine(
            {e.run_context.plan_key: plan for e, plan in zip(experiments, terms.plans, strict=True)}, device
        )
        watch.planned(experiments)
        for experiment, plan in zip(experiments, terms.plans, strict=True):
            experiment.network.module.to(device)
            # nodes of a federation send tensors of the host, whatever the server's own data is trained on
            if experiment.method.works_on_device() and getattr(engine, "replies_on_device", False):
                experiment.run_context.home = home_of(plan, device)
        drive(engine, drivers, lambda driver: watch.moved(by_context[id(driver.run_context)]), note)
    return drivers
