"""The part of a machine that one of several engine processes has. Imports no torch, because the front end makes it."""

from dataclasses import asdict, replace
from hashlib import sha256

import msgspec

from quire.core.block_keys import BlockKeys
from quire.cost.step_time import Calibration
from quire.errors import ConfigError
from quire.startup.model_info import ModelInfo

SECRET_BYTES = 32  # of a secret: keys of guessed prompts cannot be computed without it


class ReplicaShare(msgspec.Struct, frozen=True):
    """The part of a machine that one of several engine processes (replicas) has. All parts are equal.

    A replica that is ready knows all fields. Another replica, or one that replaces it, gets them from it, and measures
    neither memory nor steps, because what it would find beside busy replicas is wrong.
    """

    index: int = 0  # of the replica, from 0 on
    count: int = 1  # of replicas
    available: int | None = None  # bytes that were free before the first replica started, for all; None: not measured
    costs: Calibration | None = None  # None: not measured
    secret: bytes = b""  # of the fleet, for the keys of cached blocks; at least SECRET_BYTES if there are others

    def journal(self, path: str) -> str:
        """The path of this replica's journal. path: the option."""
        return path if self.count == 1 else f"{path}.engine-{self.index}"


WHOLE = ReplicaShare()


def block_keys(share: ReplicaShare, info: ModelInfo) -> BlockKeys | None:
    """The keys of cached blocks that all replicas and their front end use; None for an engine without others.

    Raises ConfigError for a secret that is too short.
    """
    if share.count == 1:
        return None
    if len(share.secret) < SECRET_BYTES:
        raise ConfigError(
            f"the secret of the fleet has {len(share.secret)} bytes; give {SECRET_BYTES} random ones, the same to all "
            "replicas"
        )
    options = replace(info.options, journal=None)
    decides = (info.path, asdict(options), info.cache.block_size)
    fingerprint = sha256(msgspec.json.encode(decides, order="deterministic")).hexdigest()
    return BlockKeys(info.cache.block_size, share.secret, fingerprint)
