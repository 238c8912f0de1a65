"""The user's dataset and what it hands out: encoded images and placeholders. Runs where the dataset does."""

__all__ = [
    "bad_samples",
    "compiled_transform",
    "dataset",
    "distributed",
    "encoded_image",
    "jpeg_integrity",
    "live_dataset",
    "placeholders",
    "sharded_sampler",
]
"""What other folders may import."""
