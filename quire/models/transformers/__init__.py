"""Models that the shared decoder does not support, run by transformers' code with quire's attention.

The package imports transformers (the extra `hf`), so it must be imported only if such a model is loaded.
"""

from quire.models.transformers.description import TransformersDescription, describe_transformers
from quire.models.transformers.loading import load_transformers
from quire.models.transformers.model import TransformersModel

__all__ = ["TransformersDescription", "TransformersModel", "describe_transformers", "load_transformers"]
