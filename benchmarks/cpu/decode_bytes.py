"""Bytes of weights and KV that the decoding of one token reads, from the files of a model."""

from dataclasses import replace
from math import prod

from benchmarks.cpu.engines import QUIRE, Engine
from benchmarks.cpu.gguf_file import gguf_file
from quire.models.description import describe
from quire.weights.gguf.checkpoint import GgufCheckpoint


def decode_bytes(engine: Engine) -> tuple[int, int]:
    """Bytes of the weights, and of the KV of each token before, if one sequence is decoded.

    The weights of quire have its schemes; those of other engines count as the file stores them. KV counts as 16 bits.
    An embedding table that is not the head does not count, and of the experts only those of one token do.
    """
    gguf = engine.gguf_type
    description = read = describe(GgufCheckpoint(gguf_file(engine.model, gguf)) if gguf else engine.model)
    if experts := description.config.experts:
        read = replace(read, config=replace(read.config, experts=replace(experts, num_experts=experts.per_token)))
    schemes = description.schemes(None if gguf else engine.quantization)
    weights = 0
    for name in read.weight_map:
        place = description.weight_map[name]
        if place.parameter == "embed.weight" and not description.config.tied:
            continue
        if engine.program not in QUIRE:
            weights += description.checkpoint.tensors[name].num_bytes
        elif scheme := schemes.get(place.parameter):
            weights += scheme.num_bytes(*place.shape)
        else:
            weights += 2 * prod(place.shape)
    return weights, sum(2 * 2 * layer.num_kv_heads * layer.head_dim for layer in description.kv_layers)
