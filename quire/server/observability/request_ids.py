"""Request ids: those that clients choose, those that answers get, and which belong together. Knows no routes."""

import re
from collections import OrderedDict
from uuid import uuid4

from starlette.requests import Request

from quire.server.observability.request_record import record_of

HEADER = "x-request-id"
MAX_LENGTH = 128  # characters
MOST_KNOWN = 16384
_SAFE = re.compile(rf"[A-Za-z0-9._:/=+@-]{{1,{MAX_LENGTH}}}\Z")  # as ids of proxies, tracers and clients have
_SALT_LENGTH = 12
_OPERATIONS = {  # by kind of answer, as OpenTelemetry calls them
    "chatcmpl": "chat",
    "cmpl": "text_completion",
    "generate": "text_completion",
    "embd": "embeddings",
}


def accepted(given: str | None) -> str | None:
    """A client's id as it is; None for one that is too long, or could do harm in a log."""
    return given if given is not None and _SAFE.match(given) else None


def new_id() -> str:
    """32 hex digits, at random."""
    return uuid4().hex


class RequestIds:
    """Makes the ids of answers, and knows which of them belongs to the id that a client chose.

    The engine's requests must not share an id, whatever clients send: two that send the same one get different
    answers' ids. Of the same one the latest is known, by tenant: nobody's id is in another's way.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._answers: OrderedDict[tuple[str, str], str] = OrderedDict()  # by tenant and the id that was given

    def make(self, kind: str, request: Request) -> str:
        """The id of the answer to a request, such as cmpl-..., noted in its record."""
        record = record_of(request)
        record.model, record.operation = self._model_name, _OPERATIONS[kind]
        unique = record.own if record.given is None else f"{record.given}-{record.own[:_SALT_LENGTH]}"
        record.answer_id = f"{kind}-{unique}"
        if record.given is not None:
            key = (record.tenant or "", record.given)
            self._answers[key] = record.answer_id
            self._answers.move_to_end(key)
            if len(self._answers) > MOST_KNOWN:
                self._answers.popitem(last=False)
        return record.answer_id

    def answer_id(self, tenant: str, id: str) -> str:
        """The answer's id for one that this tenant chose; any other as it is."""
        return self._answers.get((tenant, id), id)
