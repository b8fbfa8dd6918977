"""What models are made of besides matrix products."""
