"""The same experiment on Flower, with real clients. Nothing outside this folder imports flwr."""

from importlib.util import find_spec

from holdfast.core.errors import ConfigError


def need_flower() -> None:
    """Raise one line that says what is missing, before an import fails with a traceback."""
    if not _installed("flwr") or not _installed("cryptography"):  # it comes with flwr
        raise ConfigError("a federation needs Flower, which is not installed: pip install 'holdfast[flower]'")


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # its import is blocked
        return False
