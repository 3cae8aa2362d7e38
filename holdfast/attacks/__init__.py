"""What malicious clients do. An attack registers here under kind `attack`."""

from holdfast.attacks.base import Adversary, Attack, View

__all__ = ["Adversary", "Attack", "View"]
