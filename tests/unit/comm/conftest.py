"""Communicators need ranks too."""

from distributed.conftest import world

__all__ = ["world"]
