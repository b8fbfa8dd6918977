"""The fields of a body that say how urgent it is and how long its KV is worth keeping. Bounds are Terms' business."""

from typing import Annotated, Any

from pydantic import Field

from quire.config import EngineOptions
from quire.core.scheduling_params import Retention, Terms
from quire.engine.inputs import make_terms
from quire.server.api.request_params import Body, about

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


class ProgramBody(Body):
    """The program that a request is a part of (docs/programs.md)."""

    id: str = Field(description="Of one run of the program (1 to 256 characters); its requests are served together.")
    branch: str | None = about("One line of it; the trunk by default.")
    expects_more: bool | None = about("Whether another request goes on from what this one leaves; true by default.")
    ttl: float | None = about("Seconds after the end of the request for which that is expected, up to 600; 60.")


class TermsBody(Body):
    """The part of a body that says what the scheduler and the memory are asked for."""

    priority: int | None = about("Less runs earlier; 0 by default. Other values need a server with --policy priority.")
    deadline: float | None = about("Seconds within which the whole answer is of use; refused where it cannot be met.")
    timeout: Timeout | None = about("Seconds after which the request is given up: with 408, or a stream with an error.")
    retention: RetentionBody | None = about("How long the KV of this request is worth keeping.")
    program: ProgramBody | None = about("The program that this request is a part of: a hint, never refused.")

    def terms(self, options: EngineOptions) -> Terms:
        """As the engine takes them. Raises RequestError."""
        retention = Retention(**_given(self.retention))
        program = _given(self.program) or None
        return make_terms(options, self.priority, self.deadline, retention, program)


def _given(body: Body | None) -> dict[str, Any]:
    """The fields that were given a value."""
    fields = () if body is None else body.model_fields_set
    return {name: value for name in fields if (value := getattr(body, name)) is not None}
