"""The projection of latent attention to whole keys and values."""

import torch

from quire.weights.latent import Latent


def test_expanded_weights_give_keys_with_the_shared_numbers_and_values_with_zeros():
    latent, heads = Latent(rank=5, key_dim=4, shared_dim=2, value_dim=3), 3
    weight, vector, shared = torch.randn(heads * 7, 5), torch.randn(6, 5), torch.randn(6, 2)
    expanded = latent.expanded(weight)
    assert expanded.shape == latent.expanded_shape(len(weight)) == (2 * heads * 6, 7)
    keys, values = (torch.cat((vector, shared), 1) @ expanded.t()).view(6, 2, heads, 6).unbind(1)
    by_head = (vector @ weight.t()).view(6, heads, 7)
    torch.testing.assert_close(keys[..., :4], by_head[..., :4])
    assert torch.equal(keys[..., 4:], shared[:, None].expand(6, heads, 2))
    torch.testing.assert_close(values[..., :3], by_head[..., 4:])
    assert not values[..., 3:].any()
