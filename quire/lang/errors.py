"""What can go wrong in programs, as types."""

from quire.errors import QuireError


class BackendClosed(QuireError):
    """The backend takes no calls: it was closed, or is being closed."""


class GenerationFailed(QuireError):
    """A backend could not generate what a program asked for."""


class Cancelled(QuireError):
    """The program was given up before this was done."""
