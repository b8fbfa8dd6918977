"""Properties of a GGUF file's model, and the fields of a config.json that nearly all architectures have."""

from dataclasses import dataclass

from quire.weights.gguf.reader import Metadata
from quire.weights.gguf.rope import Factors, rope_parameters

ConfigDict = dict[str, object]


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """Properties of a file's model, from metadata and tensors."""

    metadata: Metadata
    names: frozenset[str]  # of all tensors
    vocab_size: int  # rows of the embedding, padding included
    rope_factors: Factors

    @property
    def all_layers(self) -> int:
        """Number of layers, with those for drafts. Raises ModelError if it is above the number of tensors."""
        layers = self.metadata.number(".block_count", least=1)
        if layers > len(self.names):
            raise self.metadata.error(f"a model of {layers} layers has more than {len(self.names)} tensors")
        return layers

    @property
    def layers(self) -> int:
        """Number of layers, without those for drafts, which are the last."""
        drafts = self.metadata.number(".nextn_predict_layers", 0)
        if drafts >= self.all_layers:
            raise self.metadata.error(f"{drafts} of {self.all_layers} layers are for drafts, so that none is left")
        return self.all_layers - drafts

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.metadata.number(".attention.head_count", least=1)

    @property
    def kv_heads(self) -> int:
        """Number of KV heads. In a list with a number for each layer, a layer that does not attend has 0."""
        key = ".attention.head_count_kv"
        if self.metadata.has_list(key):
            found = set(self.metadata.numbers(key, int, self.all_layers)) - {0}
            if len(found) == 1:
                return found.pop()
        return self.metadata.number(key, self.heads, least=1)

    @property
    def head_dim(self) -> int:
        """Size of a head. The default is hidden size / heads, as in llama.cpp."""
        hidden = self.metadata.number(".embedding_length")
        size = self.metadata.number(".attention.key_length", hidden // self.heads, least=1)
        if (value_size := self.metadata.number(".attention.value_length", size)) != size:
            raise self.metadata.error(f"keys of {size} and values of {value_size} dimensions are not supported")
        return size

    def has(self, name: str) -> bool:
        """Whether the first layer has this tensor."""
        return f"blk.0.{name}" in self.names

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 0 for a dense model."""
        return self.metadata.number(".expert_count", 0)


def common_fields(facts: GgufInfo) -> ConfigDict:
    """Fields of nearly all families."""
    metadata, inner = facts.metadata, ".feed_forward_length"
    if not metadata.has(inner) and facts.experts:
        inner = ".expert_feed_forward_length"  # all layers have experts
    return {
        "vocab_size": facts.vocab_size,
        "hidden_size": metadata.number(".embedding_length"),
        "intermediate_size": metadata.number(inner),
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "max_position_embeddings": metadata.number(".context_length"),
        "rope_parameters": rope_parameters(metadata, facts.head_dim, facts.rope_factors),
        "tie_word_embeddings": "output.weight" not in facts.names,
    }


def rms_fields(facts: GgufInfo) -> ConfigDict:
    """Fields of families with RMS norms, SiLU and a `head_dim` field."""
    return common_fields(facts) | {
        "head_dim": facts.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": facts.metadata.real(".attention.layer_norm_rms_epsilon"),
    }


def layer_types(facts: GgufInfo, every: int) -> list[str]:
    """The field `layer_types` by the file's pattern.

    The pattern is a list with a flag for each layer, or a number n: all layers but every n-th have a window.
    every: n of a file without a pattern.
    """
    key = ".attention.sliding_window_pattern"
    if facts.metadata.has_list(key):
        slides = facts.metadata.numbers(key, bool, facts.all_layers)[: facts.layers]
    else:
        every = max(facts.metadata.number(key, every), 1)
        slides = [(layer + 1) % every > 0 for layer in range(facts.layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def with_rope(fields: ConfigDict, **changes: object) -> ConfigDict:
    """The fields with changes in `rope_parameters`, which are those of all layers alike."""
    rope = fields["rope_parameters"]
    if not isinstance(rope, dict):
        raise TypeError(f"rope_parameters must be a dict, not {rope!r:.80}")
    return fields | {"rope_parameters": rope | changes}


def with_rotary_share(facts: GgufInfo, fields: ConfigDict) -> ConfigDict:
    """The fields with the share of a head that is rotated, which some families do not take as 1 if it is missing."""
    rotated = facts.metadata.number(".rope.dimension_count", facts.head_dim)
    return with_rope(fields, partial_rotary_factor=rotated / facts.head_dim)


def refuse_axes(facts: GgufInfo) -> None:
    """Raise ModelError for positions on several axes, for which the converter orders rows in another way."""
    key = ".rope.dimension_sections"
    if any(facts.metadata.numbers(key, int, 4)):
        raise facts.metadata.error(
            f"{facts.metadata.architecture}{key}, positions on several axes, is not supported in this architecture"
        )
