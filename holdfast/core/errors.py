"""The errors a user is meant to read: one line that names the cause and what to do. The command line prints
them and exits with 2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 8000  # letters of an error; one word of it may have an eighth of them
_SEQUENCE = re.compile(
    r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)"
)  # colours and moves of the cursor; titles and links


class HoldfastError(Exception):
    """An error that the user can fix. The command line never shows it as a traceback. Its text is always one
    printable line, although it may quote a file with any content.

    >>> try:
    ...     holdfast.run(method="dito")
    ... except holdfast.HoldfastError as error:
    ...     print(error)
    unknown method 'dito'; did you mean 'ditto'?
    """

    def __init__(self, said: object = ""):
        words = " ".join(_shortened(word, _LONGEST // 8) for word in str(said).split(" "))
        super().__init__(in_print(_shortened(words, _LONGEST)))


class ConfigError(HoldfastError):
    """A setting that is wrong before anything has run."""


class UnknownPart(ConfigError):
    """A name that no registered part has; a plug-in may define it."""


class NoSuchResult(ConfigError, AttributeError):
    """A result that only runs of other methods have."""


class DataError(HoldfastError):
    """Data that is missing, damaged, or cannot be divided as asked."""


class RunError(HoldfastError):
    """A run that cannot go on; names the round, the client and the stage where they are known."""


class SettingError(RunError):
    """A client half reads a setting in a way that would be wrong when several experiments are trained
    together."""


class InUse(RunError):
    """A run directory that another process holds."""


class StoreError(HoldfastError):
    """The disk refuses to write. No run is at fault, and all runs on this disk stop."""


def suggest(wrong: str, known: Iterable[str]) -> str:
    """'; did you mean x?' when one of the known names is similar, else the list of known names."""
    names = sorted(known)
    # half of a short word is one letter; of a longer one it is a coincidence
    near = get_close_matches(wrong, names, n=1, cutoff=0.5 if len(wrong) < 4 else 0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known: {', '.join(names)}" if names else ""


def _shortened(text: str, most: int) -> str:
    """The beginning and the end of a text that is too long."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def in_print(said: str) -> str:
    """A sender's text on one line, without control sequences of a terminal: logs and operators see it."""
    return "".join(letter if letter.isprintable() else " " for letter in _SEQUENCE.sub("", said))
