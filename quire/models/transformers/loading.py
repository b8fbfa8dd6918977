"""Loading of a checkpoint's weights into a transformers model, with a check that tokens are independent."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import Rotation
from quire.kernels.reference import REFERENCE
from quire.layers.context import ForwardContext
from quire.models.model import Progress
from quire.models.transformers.attention import SERVING_ATTENTION
from quire.models.transformers.construction import LazyTensor, TensorReader, construct
from quire.models.transformers.description import TransformersDescription
from quire.models.transformers.model import TransformersModel
from quire.models.transformers.split_model import SplitModel

_ORDER = (5, 2, 7, 0, 3, 6, 1, 4)  # a permutation in which no token keeps its index or its neighbours
_TOLERANCE = {torch.float32: 1e-3}  # relative difference of two results, in their norm; rounding grows with depth
_SHORT_TOLERANCE = 0.1


def load_transformers(
    description: TransformersDescription, *, dtype: str, device: str = "cpu", progress: Progress | None = None
) -> TransformersModel:
    """The model with the checkpoint's weights, cast to `dtype` ("float32", "float16" or "bfloat16").

    Weights are loaded into host memory first, whatever the device, as transformers does without further packages.
    Raises ModelError for weights that cannot be read, and for a model in which tokens depend on each other other than
    through attention.
    """
    checkpoint = description.checkpoint
    for name, stored in checkpoint.tensors.items():
        if not stored.is_float:
            raise ModelError(
                f"{stored.file}: {name}: expected a floating point type, found {stored.dtype}; "
                f"quantized checkpoints are not supported yet"
            )
    reading = TensorReader(checkpoint, progress or _no_progress)
    reads = {name: LazyTensor(reading, name) for name in checkpoint.tensors}
    try:
        model = construct(
            description.kind,
            description.config,
            reads,
            checkpoint,
            dtype=dtype,
            device=device,
            attention=SERVING_ATTENTION,
            experts=None if description.has_aligned_experts else "eager",
        )
    except ModelError:
        if reading.error is not None:
            raise reading.error from None
        raise
    loaded = TransformersModel(SplitModel(model), description.layers, description.vocab_size)
    check_tokens_independent(loaded, description.max_positions, description.architecture)
    return loaded


@torch.inference_mode()
def check_tokens_independent(model: TransformersModel, max_positions: int, architecture: str) -> None:
    """Raise ModelError unless permuted tokens with their positions give the same hidden states, permuted.

    Chunks of several sequences are concatenated. So only attention may read other tokens, and a token's position must
    come only from `positions`. The attention of this test is a function of each token alone.
    """
    order = torch.tensor(_ORDER, device=model.device)
    token_ids = torch.linspace(0, model.vocab_size - 1, len(_ORDER), device=model.device).long()
    positions = torch.linspace(0, max_positions - 1, len(_ORDER), device=model.device).long()
    context = ForwardContext(REFERENCE, _attend_alone, positions)
    one = model.forward(token_ids, context)
    other = model.forward(token_ids[order], replace(context, positions=positions[order]))
    difference = (other.float() - one.float()[order]).norm() / one.float().norm()
    if not difference <= _TOLERANCE.get(one.dtype, _SHORT_TOLERANCE):  # `not <=`, so that NaN fails
        raise ModelError(
            f"{architecture} cannot be run through transformers: a token depends on its neighbours other than "
            f"through attention, or its position on the order of the batch (difference {difference:.2g})"
        )


def _attend_alone(
    layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, rotation: Rotation | None = None
) -> Tensor:
    """Each token's values, weighted by its own queries and keys, so that the output depends on their rotation."""
    del layer, rotation
    if k is None or v is None:
        raise ValueError("models of transformers have keys and values in every layer")
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    products = q.float() * k.float()
    weights = torch.tanh(products / products.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-20))
    return (v * weights.to(v.dtype)).flatten(1)


def _no_progress(done: int, total: int) -> None:
    """Ignore the progress."""
