"""Lists of devices, as `--devices` takes them."""

from __future__ import annotations

import re

from holdfast.core.errors import ConfigError

_EXAMPLE = 'write "all" for every GPU, or a list such as cuda:0,cuda:1 or cpu,cpu'
_MOST = 1024


def parse_devices(text: str) -> list[str]:
    """The devices that a text names: "all" means every GPU of this machine."""
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not found:
            raise ConfigError(
                "--devices all: this machine has no CUDA device; --devices cpu,cpu uses two processes"
            )
        return [f"cuda:{number}" for number in range(found)]
    for name in names:
        if not re.fullmatch(r"cpu|cuda:\d+", name):
            raise ConfigError(f"--devices {text}: '{name}' is not a device; {_EXAMPLE}")
    if len({name.split(":")[0] for name in names}) > 1:
        raise ConfigError(f"--devices {text}: processes on CPUs and GPUs cannot be mixed; {_EXAMPLE}")
    if len(names) > _MOST:
        raise ConfigError(f"--devices: {len(names)} processes are more than {_MOST}")
    return names
