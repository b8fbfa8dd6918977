"""Decoders that quire has no description of, run by transformers with quire's attention.

Importing this package needs transformers (the extra `hf`), so nobody does unless the backend is wanted.
"""

from quire.models.transformers.description import BackendDescription, describe_backend
from quire.models.transformers.loading import load_backend
from quire.models.transformers.model import BackendModel

__all__ = ["BackendDescription", "BackendModel", "describe_backend", "load_backend"]
