"""Models that the shared decoder does not support, run by transformers' code with quire's attention.

The package imports transformers (the extra `hf`), so it must be imported only if such a model is loaded.
"""

from quire.models.transformers.description import BackendDescription, describe_backend
from quire.models.transformers.loading import load_backend
from quire.models.transformers.model import BackendModel

__all__ = ["BackendDescription", "BackendModel", "describe_backend", "load_backend"]
