"""The second world: the same experiment on Flower, with real clients. Nothing outside this folder imports
flwr."""

from importlib.util import find_spec

from holdfast.core.errors import ConfigError


def need_flower() -> None:
    """Say in one line what is missing, before anything is imported that would say it in thirty."""
    if not _installed("flwr") or not _installed("cryptography"):  # which comes with it
        raise ConfigError("a federation needs Flower, which is not installed: pip install 'holdfast[flower]'")


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # somebody keeps it from being imported
        return False
