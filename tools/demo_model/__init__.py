"""Training and scoring of the embedded model."""
