"""The recurrence of a layer around the recurrent states: all of its operations are kernels, which CPUs can capture."""

from operator import attrgetter

import pytest
import torch

from quire.core.kv_groups import kv_kind
from quire.core.states import StateKind
from quire.layers.attention import Attention, AttentionConfig
from quire.layers.context import ForwardContext
from quire.layers.latent_attention import LatentAttention
from quire.layers.recurrence import Recurrence, RecurrenceConfig
from quire.weights.latent import Latent
from quire.weights.placement import Placement, write_weight

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
kernels = pytest.importorskip("quire.kernels.cpu.kernels").CPU
REFERENCE = pytest.importorskip("quire.kernels.reference").REFERENCE

HIDDEN = 24
KINDS = {
    "delta": StateKind("delta", 4, 10, 4, 2, 6),
    "kda": StateKind("kda", 4, 10, 4, 2, 6),
    "mamba2": StateKind("mamba2", 4, 10, 4, 1, 6),
    "mamba2-groups": StateKind("mamba2", 4, 10, 4, 2, 6),
    "convolution": StateKind("convolution", 1, HIDDEN, 3),
}
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # with the error of the largest result


def both_of(make):
    """A layer with random weights in the layout of the reference, and with the same in that of the CPU kernels."""
    plain, packed = make(), make()
    torch.manual_seed(1)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    packed.use_kernel_layout(kernels, {}, "")
    for name, parameter in plain.named_parameters():
        write_weight(parameter, attrgetter(name)(packed), Placement(tuple(parameter.shape), name), kernels)
    return plain, packed


def context_of(given, kind):
    def recur(layer, inputs, weights):
        assert layer == 5
        assert inputs.is_contiguous()
        assert inputs.shape[1] == kind.width
        assert weights.conv_weight.shape == (kind.num_channels, kind.conv_width)
        return given.multiply_add(inputs[:, -kind.num_values :], 3.0)

    return ForwardContext(given, None, torch.zeros(0), recur=recur)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_a_replay_of_captured_kernels_equals_the_reference(name, dtype):
    kind = KINDS[name]
    config = RecurrenceConfig(kind, bias=False, conv_bias=False, norm_eps=1e-5)
    layer, packed = both_of(lambda: Recurrence(HIDDEN, config, dtype))
    x, context = torch.randn(7, HIDDEN).to(dtype), context_of(kernels, kind)
    capture = kernels.new_step_capture()  # has the memory of the results
    found, replay = capture.capture(lambda: packed(5, x, context))
    for _ in range(2):
        x.normal_()
        replay()
        expected = layer(5, x, context_of(REFERENCE, kind))
        assert (found - expected).abs().max() < DTYPES[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_latent_attention_is_captured_too(dtype):
    latent, heads = Latent(rank=20, key_dim=6, shared_dim=4, value_dim=6), 3
    config = AttentionConfig(
        num_heads=heads,
        kv=kv_kind(heads, latent.head_dim),
        qkv_bias=False,
        o_bias=False,
        qk_norm="none",
        qk_norm_bias=False,
        qk_norm_first=True,
        gate="",
        gate_in_queries=False,
        v_norm=False,
        values_are_keys=False,
        has_own_kv=True,
        norm="rms",
        norm_eps=1e-5,
        latent=latent,
    )
    layer, packed = both_of(lambda: LatentAttention(HIDDEN, config, dtype))
    x = torch.randn(7, HIDDEN).to(dtype)

    def context(given):
        def attend(number, q, k, v, rotation):
            assert (number, q.shape, rotation) == (3, (7, heads, 10), None)
            total = given.multiply_add(q.flatten(1), 0.5)
            for some in (k, v):
                total = given.multiply_add(some.flatten(1), 1.0, total)
            return total

        return ForwardContext(given, attend, torch.zeros(0))

    captured = context(kernels)
    capture = kernels.new_step_capture()  # has the memory of the results
    found, replay = capture.capture(lambda: packed(3, x, None, captured))
    x.normal_()
    replay()
    expected = layer(3, x, None, context(REFERENCE))
    assert (found - expected).abs().max() < DTYPES[dtype] * expected.abs().max()


@torch.inference_mode()
def test_the_gate_of_attention_in_its_queries_is_captured_too():
    config = AttentionConfig(
        num_heads=4,
        kv=kv_kind(2, 6),
        qkv_bias=False,
        o_bias=False,
        qk_norm="none",
        qk_norm_bias=False,
        qk_norm_first=True,
        gate="sigmoid",
        gate_in_queries=True,
        v_norm=False,
        values_are_keys=False,
        has_own_kv=True,
        norm="rms",
        norm_eps=1e-5,
    )
    layer, packed = both_of(lambda: Attention(HIDDEN, config, torch.float32))
    x = torch.randn(7, HIDDEN)

    def context(given):
        def attend(number, q, k, v, rotation):
            assert (number, q.shape, k.shape, v.shape, rotation) == (3, (7, 4, 6), (7, 2, 6), (7, 2, 6), None)
            return given.multiply_add(q.flatten(1), 2.0)

        return ForwardContext(given, attend, torch.zeros(0))

    captured = context(kernels)
    capture = kernels.new_step_capture()  # has the memory of the results
    found, replay = capture.capture(lambda: packed(3, x, None, captured))
    x.normal_()
    replay()
    torch.testing.assert_close(found, layer(3, x, None, context(REFERENCE)), rtol=1e-5, atol=1e-4)
