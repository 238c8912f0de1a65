"""DataLoader: the training loop's side. Main process."""

__all__ = ["audit", "dataloader", "stats"]
"""Modules that other folders may import."""
