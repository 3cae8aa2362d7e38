"""Published methods, one file each: a client half and a server half. The registry finds the files."""

from holdfast.core.types import Round, Steps
from holdfast.methods.base import ClientRule, Method, ServerRule
from holdfast.methods.context import Context

__all__ = ["ClientRule", "Context", "Method", "Round", "ServerRule", "Steps"]
