"""What a backdoor's trigger looks like, one file for each. The registry finds the files."""

from holdfast.attacks.triggers.base import Change, Stamp, kind_of

__all__ = ["Change", "Stamp", "kind_of"]
