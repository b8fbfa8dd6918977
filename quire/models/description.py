"""What a checkpoint holds, learnt without reading a weight, but for a head that should be the embedding.

`describe` finds what would go wrong later: missing and half-downloaded files, architectures and
options that quire does not run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from quire.errors import ModelError, nearest
from quire.kernels.contract import DTYPES
from quire.models.checkpoint import Checkpoint
from quire.models.config import DecoderConfig
from quire.models.config_fields import Fields
from quire.models.config_reader import decoder_config
from quire.models.families import FAMILIES
from quire.models.folder import FolderCheckpoint
from quire.models.model import KVLayer
from quire.models.names import Names
from quire.models.text_part import INNER, TextPart
from quire.models.weight_map import Placement, placements
from quire.models.wishes import compute_dtype, sampling_defaults, token_ids


class UnknownArchitecture(ModelError):
    """A model that quire has no description of; nothing is wrong with it."""


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """A checkpoint that quire can load."""

    checkpoint: Checkpoint
    architecture: str
    config: DecoderConfig
    names: Names
    dtype: str  # "float32", "float16" or "bfloat16": what the checkpoint asks to be computed in
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float | int]  # by names of SamplingParams

    @property
    def vocab_size(self) -> int:
        """Logits per position."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state."""
        return self.config.hidden_size

    @property
    def max_positions(self) -> int:
        """Tokens in the longest sequence that the model supports."""
        return self.config.max_positions

    @property
    def activations_per_token(self) -> int:
        """Numbers that are alive at once, at most, while a layer computes one token."""
        return self.config.activations_per_token

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """What each layer keeps."""
        config = self.config
        return tuple(KVLayer(config.num_kv_heads, config.head_dim, layer.window) for layer in config.layers)

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights; a tied head counts once."""
        return sum(math.prod(placement.shape) for placement in self.placements.values())

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights when they are loaded as `dtype`."""
        kept = sum(math.prod(place.shape) for place in self.placements.values() if place.plus)  # in float32
        return (self.num_parameters - kept) * DTYPES[dtype].itemsize + kept * DTYPES["float32"].itemsize

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        """Where each tensor of the checkpoint goes, by its name there."""
        return placements(self.config, self.names)

    def is_harmless(self, name: str) -> bool:
        """Whether a tensor that has no place can be ignored: it is derived from others."""
        return name.endswith(self.names.derived) or (self.config.tied and name == f"{self.names.head}.weight")


def describe(source: Checkpoint | Path, *, max_model_len: int | None = None) -> ModelDescription:
    """What a checkpoint, or the folder of one, holds.

    max_model_len: positions of the longest sequence that will be served, where that is less than the model
    supports; it decides how some models stretch their positions (`ropes.py`).
    Raises ModelError, saying what to do, when something is missing, incomplete or damaged, and when the
    model is not one that quire runs.
    """
    checkpoint = FolderCheckpoint(source) if isinstance(source, Path) else source
    fields = Fields(checkpoint.config, checkpoint.place)
    architecture = _architecture(fields)
    if architecture in INNER:
        text = TextPart(checkpoint, INNER[architecture])
        return replace(describe(text, max_model_len=max_model_len), architecture=architecture)
    family = FAMILIES[architecture]
    config, names = decoder_config(family, fields, max_model_len), fields.resolve(family.names)
    names = replace(names, prefix=_prefix(names, checkpoint))
    parts = sum(config.experts.num_experts if config.experts and layer.sparse else 1 for layer in config.layers)
    if 0 < len(checkpoint.tensors) < parts:  # before they are listed one by one
        raise fields.error(f"its layers and experts are {parts}, its tensors only {len(checkpoint.tensors)}")
    return ModelDescription(
        checkpoint,
        architecture,
        replace(config, tied=config.tied and not _has_own_head(names, checkpoint)),
        names,
        compute_dtype(fields, checkpoint),
        next(iter(token_ids(checkpoint, "bos_token_id")), None),
        token_ids(checkpoint, "eos_token_id"),
        sampling_defaults(checkpoint.generation_config),
    )


def _architecture(fields: Fields) -> str:
    names = [str(name) for name in fields.optional("architectures", list, [])]
    supported = ", ".join([*FAMILIES, *INNER])
    if not names:
        raise fields.error(f"architectures is missing; supported: {supported}")
    for name in names:
        if name in FAMILIES or name in INNER:
            return name
    raise UnknownArchitecture(
        f"{fields.place}: architecture {names[0]!r:.80} is not supported{nearest(names[0], FAMILIES)}; "
        f"supported: {supported}"
    )


def _has_own_head(names: Names, checkpoint: Checkpoint) -> bool:
    """Whether the file has a head that is not the embedding, whatever config.json says: it counts, as in transformers.

    Many checkpoints of tied models hold the embedding twice; the two are read only for that.
    """
    head, embed = f"{names.head}.weight", f"{names.prefix}{names.embed}.weight"
    found = [checkpoint.tensors[name] for name in (head, embed) if name in checkpoint.tensors]
    if len(found) < 2:
        return False
    if len({(stored.shape, stored.dtype) for stored in found}) > 1:
        return True
    tensors = dict(checkpoint.read([head, embed]))
    return not torch.equal(tensors[head], tensors[embed])


def _prefix(names: Names, checkpoint: Checkpoint) -> str:
    """Checkpoints that were saved without their head have names without the first part of the prefix."""
    shorter = names.prefix.partition(".")[2]
    full, cut = (f"{prefix}{names.embed}.weight" in checkpoint.tensors for prefix in (names.prefix, shorter))
    return shorter if cut and not full else names.prefix
