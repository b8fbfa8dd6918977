"""Recurrences by transformers, over all tokens of a sequence at once: the oracle of `recur`."""

import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from quire.core.states import StateKind
from quire.kernels.state_contract import RecurrenceWeights


def recurrence(kind: StateKind, inputs: Tensor, weights: RecurrenceWeights) -> tuple[Tensor, Tensor]:
    """The outputs (num_tokens, num_values) of inputs (num_tokens, width) from position 0 on, and the state behind them.

    Computed in float32.
    """
    inputs, num_tokens, heads = inputs.float(), len(inputs), kind.num_value_heads
    bias = None if weights.conv_bias is None else weights.conv_bias.float()
    activation = None if kind.rule == "convolution" else "silu"
    x, gates = inputs.tensor_split((kind.num_channels,), 1)
    x = causal_conv1d_fn(x.t()[None], weights.conv_weight.float(), bias, activation=activation)[0, :, :num_tokens].t()
    if kind.rule == "convolution":
        return x, torch.zeros(0)
    size = kind.num_key_heads * kind.key_dim
    q, k = (some.reshape(1, num_tokens, kind.num_key_heads, kind.key_dim) for some in x[:, : 2 * size].split(size, 1))
    v = x[:, 2 * size :].reshape(1, num_tokens, heads, kind.value_dim)
    if kind.rule == "kda":
        b, a = gates.split((heads, size), 1)
        shared = heads // kind.num_key_heads
        # as in its KimiLinearForgetGate and repeated for the value heads of a key head
        times = torch.nn.functional.softplus(a + weights.time_bias).view(num_tokens, -1, kind.key_dim)
        q, k, times = (some.repeat_interleave(shared, -2) for some in (q, k, times))
        out, state = recurrent_kimi_delta_attention(
            *(q, k, v),
            g=(weights.decay[:, None] * times)[None],
            beta=torch.sigmoid(b)[None],
            initial_state=None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out.reshape(num_tokens, -1), state[0]
    if kind.rule == "delta":
        b, a = gates.split(heads, 1)
        g = weights.decay * torch.nn.functional.softplus(a + weights.time_bias)
        out, state = torch_chunk_gated_delta_rule(
            *(q, k, v),
            g=g[None],
            beta=torch.sigmoid(b)[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out.reshape(num_tokens, -1), state[0]
    out, state = mamba2_chunk_scan(
        *(v, gates[None], weights.decay, k, q, 16),
        D=weights.skip,
        dt_bias=weights.time_bias,
        dt_softplus=True,
        dt_limit=weights.time_limits,
        return_final_states=True,
    )
    return out.reshape(num_tokens, -1), state[0].transpose(1, 2)
