"""Description of a checkpoint for the shared decoder, without reading weights (except a head that may be tied).

`describe` detects errors before loading: missing and half-downloaded files, unsupported architectures and options.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from quire.config import Classification
from quire.core.kv_groups import StoredKind
from quire.core.states import StateKind
from quire.errors import ModelError, RequestError, nearest
from quire.kernels.contract import DTYPES, Scheme
from quire.layers.attention import AttentionConfig
from quire.models import gpt_like, hybrids, llama_like, mixtures
from quire.models.classification import CLASSIFIERS, is_classifier, read_classification
from quire.models.config import DecoderConfig, TensorNames
from quire.models.config_fields import Fields
from quire.models.config_reader import decoder_config
from quire.models.family import LLAMA, Family
from quire.models.text_part import TEXT_MODELS, UNSUPPORTED_WITHOUT_IMAGES, TextCheckpoint
from quire.models.weight_map import build_weight_map
from quire.params import SamplingParams
from quire.weights.checkpoint import Checkpoint, FolderCheckpoint
from quire.weights.placement import Placement
from quire.weights.schemes import NO_SCHEMES, Schemes, schemes_at_load, schemes_of_checkpoint

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": LLAMA,
        "MistralForCausalLM": llama_like.MISTRAL,
        "Qwen2ForCausalLM": llama_like.QWEN2,
        "Qwen3ForCausalLM": llama_like.QWEN3,
        "GemmaForCausalLM": llama_like.GEMMA,
        "Gemma2ForCausalLM": llama_like.GEMMA2,
        "Gemma3ForCausalLM": llama_like.GEMMA3,
        "Gemma4ForCausalLM": mixtures.GEMMA4,
        "Phi3ForCausalLM": llama_like.PHI3,
        "Olmo2ForCausalLM": llama_like.OLMO2,
        "GraniteForCausalLM": llama_like.GRANITE,
        "Olmo3ForCausalLM": llama_like.OLMO3,
        "Exaone4ForCausalLM": llama_like.EXAONE4,
        "SmolLM3ForCausalLM": llama_like.SMOLLM3,
        "SeedOssForCausalLM": llama_like.SEED_OSS,
        "Ernie4_5ForCausalLM": llama_like.ERNIE4_5,
        "Glm4ForCausalLM": llama_like.GLM4,
        "ArceeForCausalLM": llama_like.ARCEE,
        "Ministral3ForCausalLM": llama_like.MINISTRAL3,
        "ApertusForCausalLM": llama_like.APERTUS,
        "HunYuanDenseV1ForCausalLM": llama_like.HUNYUAN,
        "MixtralForCausalLM": mixtures.MIXTRAL,
        "Qwen2MoeForCausalLM": mixtures.QWEN2_MOE,
        "Qwen3MoeForCausalLM": mixtures.QWEN3_MOE,
        "OlmoeForCausalLM": mixtures.OLMOE,
        "PhimoeForCausalLM": mixtures.PHIMOE,
        "GraniteMoeForCausalLM": mixtures.GRANITE_MOE,
        "GraniteMoeSharedForCausalLM": mixtures.GRANITE_MOE_SHARED,
        "MellumForCausalLM": mixtures.MELLUM,
        "HunYuanMoEV1ForCausalLM": mixtures.HUNYUAN_MOE,
        "Ernie4_5_MoeForCausalLM": mixtures.ERNIE4_5_MOE,
        "Glm4MoeForCausalLM": mixtures.GLM4_MOE,
        "Dots1ForCausalLM": mixtures.DOTS1,
        "MiniMaxM2ForCausalLM": mixtures.MINIMAX_M2,
        "HYV3ForCausalLM": mixtures.HY3,
        "AfmoeForCausalLM": mixtures.TRINITY,
        "LagunaForCausalLM": mixtures.LAGUNA,
        "Qwen3NextForCausalLM": hybrids.QWEN3_NEXT,
        "Qwen3_5ForCausalLM": hybrids.QWEN3_5,
        "Qwen3_5MoeForCausalLM": hybrids.QWEN3_5_MOE,
        "Lfm2ForCausalLM": hybrids.LFM2,
        "Lfm2MoeForCausalLM": hybrids.LFM2_MOE,
        "GraniteMoeHybridForCausalLM": hybrids.GRANITE_HYBRID,
        "NemotronHForCausalLM": hybrids.NEMOTRON_H,
        "KimiLinearForCausalLM": hybrids.KIMI_LINEAR,
        "GPT2LMHeadModel": gpt_like.GPT2,
        "OPTForCausalLM": gpt_like.OPT,
        "GPTNeoXForCausalLM": gpt_like.NEOX,
        "FalconForCausalLM": gpt_like.FALCON,
        "PhiForCausalLM": gpt_like.PHI,
        "Starcoder2ForCausalLM": gpt_like.STARCODER2,
        "StableLmForCausalLM": gpt_like.STABLELM,
        "CohereForCausalLM": gpt_like.COHERE,
        "Cohere2ForCausalLM": gpt_like.COHERE2,
        "NemotronForCausalLM": gpt_like.NEMOTRON,
    }
)
# architecture of a decoder without a head, as embedding models are published -> that of the same decoder with one
BASE_MODELS: Mapping[str, str] = MappingProxyType(
    {
        **{name.replace("ForCausalLM", "Model"): name for name in FAMILIES if name.endswith("ForCausalLM")},
        "GPT2Model": "GPT2LMHeadModel",
        "Gemma3Model": "",  # has a vision tower
        "Gemma3TextModel": "Gemma3ForCausalLM",
        "Gemma4Model": "",
        "Gemma4TextModel": "Gemma4ForCausalLM",
        "Qwen3_5Model": "",
        "Qwen3_5TextModel": "Qwen3_5ForCausalLM",
        "Qwen3_5MoeModel": "",
        "Qwen3_5MoeTextModel": "Qwen3_5MoeForCausalLM",
    }
)
# architecture in a published config.json -> its name in transformers
OTHER_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {"PhiMoEForCausalLM": "PhimoeForCausalLM", "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}
)
_ENCODERS = (  # first parts of the names of models that attend in both directions
    *("Albert", "Bert", "Camembert", "ConvBert", "Deberta", "DebertaV2", "DistilBert", "Electra", "Ernie", "EuroBert"),
    *("Flaubert", "JinaBert", "Longformer", "MPNet", "MT5Encoder", "MobileBert", "ModernBert", "New", "NomicBert"),
    *("RemBert", "RoFormer", "Roberta", "T5Encoder", "XLMRoberta", "XLMRobertaXL", "XLNet"),
)
_ENCODER = re.compile(rf"({'|'.join(_ENCODERS)})(Model|ForMaskedLM|ForPreTraining)")

# architecture -> the values of `model_type` with which it is published, the one of transformers first
MODEL_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("llama",),
        "MistralForCausalLM": ("mistral",),
        "Qwen2ForCausalLM": ("qwen2",),
        "Qwen3ForCausalLM": ("qwen3",),
        "GemmaForCausalLM": ("gemma",),
        "Gemma2ForCausalLM": ("gemma2",),
        "Gemma3ForCausalLM": ("gemma3_text",),
        "Gemma4ForCausalLM": ("gemma4_text",),
        "Phi3ForCausalLM": ("phi3",),
        "Olmo2ForCausalLM": ("olmo2",),
        "GraniteForCausalLM": ("granite",),
        "Olmo3ForCausalLM": ("olmo3",),
        "Exaone4ForCausalLM": ("exaone4",),
        "SmolLM3ForCausalLM": ("smollm3",),
        "SeedOssForCausalLM": ("seed_oss",),
        "Ernie4_5ForCausalLM": ("ernie4_5",),
        "Glm4ForCausalLM": ("glm4",),
        "ArceeForCausalLM": ("arcee",),
        "Ministral3ForCausalLM": ("ministral3",),
        "ApertusForCausalLM": ("apertus",),
        "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense",),
        "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe",),
        "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe",),
        "Glm4MoeForCausalLM": ("glm4_moe",),
        "Dots1ForCausalLM": ("dots1",),
        "MiniMaxM2ForCausalLM": ("minimax_m2",),
        "HYV3ForCausalLM": ("hy_v3",),
        "AfmoeForCausalLM": ("afmoe",),
        "LagunaForCausalLM": ("laguna",),
        "OlmoeForCausalLM": ("olmoe",),
        "PhimoeForCausalLM": ("phimoe",),
        "GraniteMoeForCausalLM": ("granitemoe",),
        "GraniteMoeSharedForCausalLM": ("granitemoeshared",),
        "MellumForCausalLM": ("mellum",),
        "MixtralForCausalLM": ("mixtral",),
        "Qwen2MoeForCausalLM": ("qwen2_moe",),
        "Qwen3MoeForCausalLM": ("qwen3_moe",),
        "Qwen3NextForCausalLM": ("qwen3_next",),
        "Qwen3_5ForCausalLM": ("qwen3_5_text",),
        "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text",),
        "Lfm2ForCausalLM": ("lfm2",),
        "Lfm2MoeForCausalLM": ("lfm2_moe",),
        "GraniteMoeHybridForCausalLM": ("granitemoehybrid",),
        "NemotronHForCausalLM": ("nemotron_h",),
        "KimiLinearForCausalLM": ("kimi_linear",),
        "GPT2LMHeadModel": ("gpt2",),
        "OPTForCausalLM": ("opt",),
        "GPTNeoXForCausalLM": ("gpt_neox",),
        "FalconForCausalLM": ("falcon", "RefinedWeb", "RefinedWebModel"),
        "PhiForCausalLM": ("phi", "phi-msft"),
        "Starcoder2ForCausalLM": ("starcoder2",),
        "StableLmForCausalLM": ("stablelm", "stablelm_epoch"),
        "CohereForCausalLM": ("cohere",),
        "Cohere2ForCausalLM": ("cohere2",),
        "NemotronForCausalLM": ("nemotron",),
    }
)


_QUANTIZED = re.compile(r"(float|F)[468](_|$)|u?int\d|[IU]\d")  # names of such types in torch and safetensors
_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAMPLING_FIELDS: Mapping[str, str] = MappingProxyType(  # names of generation_config.json -> of SamplingParams
    {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)


def compute_dtype(fields: Fields, checkpoint: Checkpoint) -> str:
    """The field `dtype` or `torch_dtype` of config.json, else the type of the first tensor. Raises ModelError."""
    name = fields.optional("dtype", str, fields.optional("torch_dtype", str, ""))
    if not name:
        stored = next(iter(checkpoint.tensors.values()), None)
        if stored is None:
            raise fields.error("the weights hold no tensors; download them again")
        name = _STORED_DTYPES.get(stored.dtype, stored.dtype)
    if name not in DTYPES:
        why = ", as quantized checkpoints are not yet" if _QUANTIZED.match(name) else ""
        raise fields.error(f"dtype {name!r:.80} is not supported{why}; supported: {', '.join(DTYPES)}")
    return name


def token_ids(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """Token ids from generation_config.json, else from config.json. The field is an id, a list of ids, or missing."""
    value = checkpoint.generation_config.get(name)
    if value is None:
        value = checkpoint.config.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{checkpoint.path}: {name} must be a token id or a list of them, not {value!r:.80}")
    return tuple(ids)


def sampling_defaults(generation: Mapping[str, object]) -> Mapping[str, float | int]:
    """Fields of generation_config.json that are valid SamplingParams, by names of SamplingParams."""
    found: dict[str, float | int] = {}
    for theirs, ours in SAMPLING_FIELDS.items():
        value = generation.get(theirs)
        if isinstance(value, int | float) and _is_valid(ours, value):
            found[ours] = value
    return found


def _is_valid(name: str, value: float | int) -> bool:
    field: dict[str, Any] = {name: value}
    try:
        SamplingParams(**field)
    except RequestError:
        return False
    return True


class UnknownArchitecture(ModelError):
    """The architecture is not one of FAMILIES. The checkpoint itself may be valid."""


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """A checkpoint that the shared decoder can load. See Description."""

    checkpoint: Checkpoint
    architecture: str
    config: DecoderConfig
    names: TensorNames
    dtype: str  # compute dtype: "float32", "float16" or "bfloat16"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float | int]  # by names of SamplingParams
    classification: Classification | None  # of the classification head; None for a language model

    @property
    def generates(self) -> bool:
        """See Description."""
        return self.classification is None and self.architecture not in BASE_MODELS

    @property
    def vocab_size(self) -> int:
        """See Description."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """See Description."""
        return self.config.hidden_size

    @property
    def max_positions(self) -> int:
        """See Description."""
        return self.config.max_positions

    @property
    def activations_per_token(self) -> int:
        """See Description."""
        return self.config.activations_per_token

    @property
    def kv_layers(self) -> tuple[StoredKind, ...]:
        """See Description."""
        return tuple(mixer.kv for mixer in self.config.attentions if mixer.has_own_kv)

    @property
    def state_layers(self) -> tuple[StateKind, ...]:
        """See Description."""
        return tuple(mixer.kind for mixer in self.config.recurrences)

    @property
    def num_parameters(self) -> int:
        """See Description."""
        return sum(math.prod(placement.shape) for placement in self.weight_map.values())

    def schemes(self, quantization: str | None) -> Schemes:
        """See Description."""
        if quantization == "none":
            return NO_SCHEMES
        if quantization is not None:
            parameters = {place.parameter for place in self.weight_map.values()}
            return schemes_at_load(quantization, sorted(parameters), tied=self.config.tied)
        tensors = self.checkpoint.tensors
        stored = {name: tensors[name].scheme if name in tensors else None for name in self.weight_map}
        return schemes_of_checkpoint(self.weight_map, stored)

    def weight_bytes(self, dtype: str, schemes: Schemes = NO_SCHEMES) -> int:
        """See Description."""
        return sum(self.tensor_bytes(place, dtype, schemes.get(place.parameter)) for place in self.weight_map.values())

    @staticmethod
    def tensor_bytes(place: Placement, dtype: str, scheme: Scheme | None) -> int:
        """Bytes of one tensor of the weight map if it is loaded in `scheme`, or as `dtype` without one."""
        if scheme is not None:
            *stack, rows, columns = place.read_shape
            rows, columns = (columns, rows) if place.transposed else (rows, columns)
            return math.prod(stack) * scheme.num_bytes(rows, columns)
        kept = "float32" if place.offset or place.is_float32 else dtype
        shape = place.read_shape if place.latent is None else place.latent.expanded_shape(place.shape[0])
        return math.prod(shape) * DTYPES[kept].itemsize

    @cached_property
    def weight_map(self) -> Mapping[str, Placement]:
        """The weight map: checkpoint name -> Placement."""
        return build_weight_map(self.config, self.names)

    @property
    def skipped(self) -> str:
        """What the checkpoint has of other parts, in words; "" if there is nothing."""
        if isinstance(self.checkpoint, TextCheckpoint):
            return self.checkpoint.skipped
        drafts = [name for name in self.checkpoint.tensors if name.startswith(self.names.ignored_prefixes)]
        return f"{len(drafts)} tensors of layers for drafts are not read" if drafts else ""

    def is_redundant(self, name: str) -> bool:
        """Whether a tensor without a Placement can be ignored, because it is derived from others."""
        names, first = self.names, self.config.num_layers
        extra = tuple(names.prefix + names.layer.format(first + index) for index in range(names.extra_layers))
        unused = tuple(  # keys and values of layers that attend to those of another layer
            f"{names.prefix}{names.layer.format(index)}{source}."
            for index, layer in enumerate(self.config.layers)
            if isinstance(layer.mixer, AttentionConfig) and not layer.mixer.has_own_kv
            for source in (*names.qkv[1:], names.k_norm, names.v_norm)
        )
        if name.startswith((*extra, *unused, *names.ignored_prefixes)) or name.endswith(names.ignored_suffixes):
            return True
        return self.config.tied and name == f"{names.head}.weight"


def describe(source: Checkpoint | Path, *, max_model_len: int | None = None) -> ModelDescription:
    """The description of a checkpoint, or of the checkpoint in a folder.

    max_model_len: positions of the longest sequence that will be served, if that is less than the model supports. Some
    rope scalings depend on it (`rope_config.py`).
    Raises ModelError with a remedy if something is missing, incomplete, damaged or not supported.
    """
    checkpoint = FolderCheckpoint(source) if isinstance(source, Path) else source
    fields = Fields(checkpoint.config, checkpoint.path)
    architecture = _architecture(fields)
    if architecture in TEXT_MODELS:
        text = TextCheckpoint(checkpoint, architecture)
        return replace(describe(text, max_model_len=max_model_len), architecture=architecture)
    decoder = CLASSIFIERS.get(architecture) or BASE_MODELS.get(architecture, architecture)
    kind = fields.optional("model_type", str, MODEL_TYPES[decoder][0])
    if kind not in MODEL_TYPES[decoder]:
        raise fields.error(
            f"model_type {kind!r:.80} is not that of {architecture}, {' or '.join(MODEL_TYPES[decoder])}; one of "
            "the two fields names another model"
        )
    family = FAMILIES[decoder]
    config, names = decoder_config(family, fields, max_model_len), fields.resolve(family.names)
    names = replace(names, prefix=_prefix(names, checkpoint))
    names = replace(names, transposed_stacks=_has_transposed_stacks(names, config, checkpoint))
    names = replace(names, is_stacked=names.is_stacked or _has_stacks(names, checkpoint))
    if _has_split_inputs(names, checkpoint):
        names = replace(names, recurrence_inputs=TensorNames().recurrence_inputs)
    if not _has_fused_shared(names, checkpoint):
        names = replace(names, shared_up=TensorNames().shared_up)
    classification = read_classification(fields) if architecture in CLASSIFIERS else None
    if classification is not None:  # no token is sampled, so that a head over the vocabulary is not needed
        config = replace(config, tied=True, num_classes=len(classification.labels))
    elif architecture in BASE_MODELS:
        config = replace(config, tied=True)
    else:
        config = replace(config, tied=config.tied and not _has_own_head(names, checkpoint))
    per_layer = 1 if config.experts is None or names.is_stacked else config.experts.num_experts
    parts = sum(per_layer if layer.has_experts else 1 for layer in config.layers)
    if 0 < len(checkpoint.tensors) < parts:  # before the weight map is built, which would be large
        raise fields.error(f"it has {parts} layers and experts, but the weights only {len(checkpoint.tensors)} tensors")
    return ModelDescription(
        checkpoint,
        architecture,
        config,
        names,
        compute_dtype(fields, checkpoint),
        next(iter(token_ids(checkpoint, "bos_token_id")), None),
        token_ids(checkpoint, "eos_token_id"),
        sampling_defaults(checkpoint.generation_config),
        classification,
    )


def _architecture(fields: Fields) -> str:
    names = [str(name) for name in fields.optional("architectures", list, [])]
    supported = ", ".join([*FAMILIES, *TEXT_MODELS])
    if not names:
        raise fields.error(f"architectures is missing; supported: {supported}")
    for spelled in names:
        name = OTHER_SPELLINGS.get(spelled, spelled)
        if name in FAMILIES or name in TEXT_MODELS or name in CLASSIFIERS or BASE_MODELS.get(name):
            return name
        if why := UNSUPPORTED_WITHOUT_IMAGES.get(name):
            raise fields.error(f"architecture {name} is not supported: {why}")
    if is_classifier(names[0]):  # transformers as a backend has no classification heads
        raise fields.error(
            f"the classification head of {names[0]!r:.80} is not supported{nearest(names[0], CLASSIFIERS)}; "
            f"supported: {', '.join(CLASSIFIERS)}"
        )
    if _ENCODER.fullmatch(names[0]):
        raise fields.error(
            f"architecture {names[0]!r:.80} is an encoder, which attends in both directions; quire runs decoders only"
        )
    raise UnknownArchitecture(
        f"{fields.path}: architecture {names[0]!r:.80} is not supported{nearest(names[0], FAMILIES)}; "
        f"supported: {supported}"
    )


def _has_own_head(names: TensorNames, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a head that differs from the embedding. As in transformers, it overrides config.json.

    Many checkpoints of tied models have the embedding twice. So the two tensors are read and compared.
    """
    head, embed = f"{names.head}.weight", f"{names.prefix}{names.embed}.weight"
    found = [checkpoint.tensors[name] for name in (head, embed) if name in checkpoint.tensors]
    if len(found) < 2:
        return False
    if len({(stored.shape, stored.dtype) for stored in found}) > 1:
        return True
    tensors = dict(checkpoint.read([head, embed]))
    return not torch.equal(tensors[head], tensors[embed])


def _has_stacks(names: TensorNames, checkpoint: Checkpoint) -> bool:
    """Whether the experts of a layer are one tensor in the checkpoint."""
    return any(name.endswith(names.stacked_up) for name in checkpoint.tensors)


def _has_split_inputs(names: TensorNames, checkpoint: Checkpoint) -> bool:
    """Whether inputs and output gate of a recurrence are two tensors in the checkpoint, as in GGUF files."""
    split = f".{names.recurrence}{TensorNames().recurrence_inputs[0]}.weight"
    return any(name.endswith(split) for name in checkpoint.tensors)


def _has_fused_shared(names: TensorNames, checkpoint: Checkpoint) -> bool:
    """Whether gate and up of the shared expert are one tensor in the checkpoint."""
    fused = f".{names.shared}{names.shared_up[0]}.weight"
    return len(names.shared_up) == 1 and any(name.endswith(fused) for name in checkpoint.tensors)


def _prefix(names: TensorNames, checkpoint: Checkpoint) -> str:
    """The prefix of tensor names. Checkpoints that were saved without the head lack its first part."""
    shorter = names.prefix.partition(".")[2]
    full, cut = (f"{prefix}{names.embed}.weight" in checkpoint.tensors for prefix in (names.prefix, shorter))
    return shorter if cut and not full else names.prefix


def _has_transposed_stacks(names: TensorNames, config: DecoderConfig, checkpoint: Checkpoint) -> bool:
    """Whether the stacked experts are stored as (expert, in, out), which the shape of either kind of stack tells."""
    if config.experts is None:
        return False
    size, inner = config.experts.latent_size or config.hidden_size, config.experts.intermediate_size
    shapes = {names.stacked_up: (len(names.expert_up) * inner, size), names.stacked_down: (size, inner)}
    return any(
        name.endswith(stack) and stored.shape[1:] == (columns, rows) != (rows, columns)
        for stack, (rows, columns) in shapes.items()
        for name, stored in checkpoint.tensors.items()
    )
