"""What malicious clients do, one file for each attack. The registry finds the files."""

from holdfast.attacks.adversary import Adversary
from holdfast.attacks.base import Attack, Trigger, View

__all__ = ["Adversary", "Attack", "Trigger", "View"]
