"""The schedule of a training run: tokens, row lengths, learning rates."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run of at least `tokens` tokens. Row lengths increase during the run, because short rows are cheap."""

    tokens: int
    tokens_per_step: int = 4096
    lengths: tuple[tuple[int, float], ...] = ((256, 0.64), (1024, 0.21), (2048, 0.15))  # (row length, share of tokens)
    warm_up_steps: int = 60
    hold: float = 0.5  # share of the run at the full learning rate, before it falls linearly
    lowest: float = 0.03  # what it falls to, as a share of the full one
    matrix_lr: float = 0.02  # Muon
    other_lr: float = 3e-3  # AdamW
    seed: int = 0

    def scaled(self, scale: float, seed: int) -> "Plan":
        """The plan with other numbers of tokens and seed. A run shorter than a row has one step of one row."""
        tokens, row = round(self.tokens * scale), self.lengths[0][0]
        per_step = row if tokens < row else self.tokens_per_step
        return replace(self, tokens=tokens, tokens_per_step=per_step, seed=seed)

    @property
    def num_steps(self) -> int:
        """Number of steps. All have tokens_per_step tokens."""
        return -(-self.tokens // self.tokens_per_step)

    def row_length(self, step: int) -> int:
        """Tokens per row in this step."""
        passed = 0.0
        for length, share in self.lengths:
            passed += share
            if step < passed * self.num_steps:
                return length
        return self.lengths[-1][0]

    def pace(self, step: int) -> float:
        """The factor of the learning rates in this step: warm-up, constant, linear decay."""
        left = 1 - step / self.num_steps
        return min(1.0, (step + 1) / self.warm_up_steps) * max(self.lowest, min(1.0, left / (1 - self.hold)))
