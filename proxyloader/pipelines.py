"""Ready DALI pipelines for image classification: the public name of ``reader/pipelines.py``."""

from .reader.pipelines import MEAN, STD, from_workers, rotation, training, validation

__all__ = ["MEAN", "STD", "from_workers", "rotation", "training", "validation"]
