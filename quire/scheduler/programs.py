"""Programs: when each began. What a program asks counts as arrived then, so that who began first is done first."""

from collections import OrderedDict

from quire.core.request import Request

LEAD = 10.0  # seconds: a request counts as that much older than it is, at most
MOST_PROGRAMS = 4096  # that are remembered

Place = tuple[float, int]  # when it counts as arrived, and the sequence that came then


class Programs:
    """Programs that have begun, by tenant and id. Knows no sequences.

    Nobody is passed by a request that came more than LEAD seconds later, so nobody starves.
    """

    def __init__(self) -> None:
        self._begun: OrderedDict[tuple[str, str], Place] = OrderedDict()  # who asked last is last
        self._now = 0.0

    def place(self, request: Request, first_id: int, now: float) -> Place:
        """Where a request stands that comes now. first_id: of its sequences. Without a program: by its arrival."""
        now = self._now = max(self._now, now)
        key = program_of(request)
        if key is None:
            return now, first_id
        began, number = self._begun.setdefault(key, (now, first_id))
        self._begun.move_to_end(key)
        if len(self._begun) > MOST_PROGRAMS:
            self._begun.popitem(last=False)
        return max(began, now - LEAD), number

    def end(self, tenant: str, program: str) -> None:
        """It asks nothing more. One that is unknown is ignored."""
        self._begun.pop((tenant, program), None)


def program_of(request: Request) -> tuple[str, str] | None:
    """Tenant and id of the program that a request is a part of."""
    program = request.terms.program
    return None if program is None else (request.namespace.tenant, program.id)
