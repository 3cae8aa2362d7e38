"""Where a sweep runs, as the user asks for it: in this process, on the devices of this machine, or on Ray."""

from __future__ import annotations

from holdfast.core.errors import ConfigError
from holdfast.sweeps.launch import OnDevices
from holdfast.sweeps.launch_ray import INTERVAL, OnRay
from holdfast.sweeps.ray_executor import LOCAL

Launchers = OnDevices | OnRay


def launcher_of(
    ray: bool | str | None = None, devices: str | None = None, ray_interval: float | None = None
) -> Launchers | None:
    """What runs a sweep for these arguments; None for this process. `ray` is True for a cluster that is
    started on this machine, or the address of one."""
    if ray is None or ray is False:
        if ray_interval is not None:
            raise ConfigError("ray_interval: it belongs to ray; give ray too, or leave it out")
        return None if devices is None else OnDevices(devices)
    if devices is not None:
        raise ConfigError("devices and ray: Ray chooses the devices itself; leave one of them out")
    if not (ray is True or isinstance(ray, str) and ray.strip()):
        raise ConfigError(f"ray: give True, or the address HOST:PORT of a cluster, not {ray!r}")
    interval = INTERVAL if ray_interval is None else ray_interval
    if not 0 < interval < float("inf"):
        raise ConfigError(f"ray_interval: {interval} is not a number of seconds above 0")
    return OnRay(LOCAL if ray is True else str(ray).strip(), float(interval))
