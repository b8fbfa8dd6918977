"""The fields of a body that say how urgent it is and how long its KV is worth keeping. Bounds are Terms' business."""

from typing import Annotated

from pydantic import Field

from quire.config import EngineOptions
from quire.core.terms import Retention, Terms
from quire.engine.terms import make_terms
from quire.server.body import Body, about

MAX_TIMEOUT = 86_400.0  # seconds
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT, allow_inf_nan=False)]


class RetentionBody(Body):
    """What becomes of the KV that a request leaves behind."""

    priority: int | None = about(
        "0 to 100; what has less is given up first. Other than 50 needs --eviction priority or cost."
    )
    ttl: float | None = about("Seconds after the end of the request for which this holds; null: for ever.")
    pin: bool | None = about("Not to be given up at all, within bounds (docs/eviction.md); false by default.")
    session: str | None = about("A conversation (1 to 256 characters), whose latest request decides for all of it.")


class TermsBody(Body):
    """The part of a body that says what the scheduler and the memory are asked for."""

    priority: int | None = about("Less runs earlier; 0 by default. Other values need a server with --policy priority.")
    deadline: float | None = about("Seconds within which the whole answer is of use; refused where it cannot be met.")
    timeout: Timeout | None = about("Seconds after which the request is given up: with 408, or a stream with an error.")
    retention: RetentionBody | None = about("How long the KV of this request is worth keeping.")

    def terms(self, options: EngineOptions) -> Terms:
        """As the engine takes them. Raises RequestError."""
        asked = self.retention
        given = {} if asked is None else {name: getattr(asked, name) for name in asked.model_fields_set}
        retention = Retention(**{name: value for name, value in given.items() if value is not None})
        return make_terms(options, self.priority, self.deadline, retention)
