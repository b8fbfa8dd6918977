"""The part of a machine that one of several engine processes has. Imports no torch, because the front end makes it."""

import msgspec

from quire.cost.step_time import Calibration


class ReplicaShare(msgspec.Struct, frozen=True):
    """The part of a machine that one of several engine processes (replicas) has. All parts are equal.

    A replica that is ready knows all fields. Another replica, or one that replaces it, gets them from it, and measures
    neither memory nor steps, because what it would find beside busy replicas is wrong.
    """

    index: int = 0  # of the replica, from 0 on
    count: int = 1  # of replicas
    available: int | None = None  # bytes that were free before the first replica started, for all; None: not measured
    costs: Calibration | None = None  # None: not measured

    def journal(self, path: str) -> str:
        """The path of this replica's journal. path: the option."""
        return path if self.count == 1 else f"{path}.engine-{self.index}"


WHOLE = ReplicaShare()
