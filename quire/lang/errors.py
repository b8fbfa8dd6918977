"""Errors of programs."""

from quire.errors import QuireError


class BackendClosed(QuireError):
    """The backend was closed, or is being closed."""


class GenerationFailed(QuireError):
    """A backend could not generate what a program asked for."""


class Cancelled(QuireError):
    """The program was cancelled before this was done."""
