"""Sizes of latent attention (MLA; DeepSeek-AI, 2024), and its projection to whole keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class Latent:
    """The vector of a token from which the keys and values of all heads are computed.

    A key is `key_dim` numbers of its head, then `shared_dim` numbers that all heads share. Values are kept with the
    size of keys: zeros follow their `value_dim` numbers.
    """

    rank: int  # numbers of the vector
    key_dim: int
    shared_dim: int
    value_dim: int  # at most head_dim

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.key_dim + self.shared_dim

    @property
    def width(self) -> int:
        """Numbers of the vector, then those that all keys share."""
        return self.rank + self.shared_dim

    def expanded_shape(self, rows: int) -> tuple[int, int]:
        """The shape of a checkpoint's weight of this many rows that is expanded."""
        return 2 * rows // (self.key_dim + self.value_dim) * self.head_dim, self.width

    def expanded(self, weight: Tensor) -> Tensor:
        """A checkpoint's weight as one for `width` numbers of a token: see `whole`.

        weight (heads * (key_dim + value_dim), rank) -> (2 * heads * head_dim, width). Each key gets the shared numbers
        by an identity matrix.
        """
        found = pad(self.whole(weight), (0, self.shared_dim))
        keys = found[: len(found) // 2].view(-1, self.head_dim, self.width)
        keys[:, self.key_dim :, self.rank :] = torch.eye(self.shared_dim, dtype=weight.dtype, device=weight.device)
        return found

    def whole(self, rows: Tensor) -> Tensor:
        """Rows of the keys and values of all heads in order: first those of all keys, then those of all values.

        rows (heads * (key_dim + value_dim), n) -> (2 * heads * head_dim, n). Added rows are zeros.
        """
        by_head = rows.view(-1, self.key_dim + self.value_dim, rows.shape[1])
        keys, values = by_head.tensor_split((self.key_dim,), 1)
        return torch.cat([pad(some, (0, 0, 0, self.head_dim - some.shape[1])) for some in (keys, values)]).flatten(0, 1)
