"""The user's dataset and what it returns: encoded images and placeholders. Runs where the dataset runs."""

__all__ = [
    "bad_samples",
    "compiled_transform",
    "dataset",
    "distributed",
    "encoded_image",
    "jpeg_header",
    "jpeg_integrity",
    "lazy_image",
    "live_dataset",
    "placeholders",
    "sharded_sampler",
]
"""Modules that other folders may import."""
