"""DataLoader: the training loop's side. Main process."""

__all__ = ["audit", "dataloader"]
"""Modules that other folders may import."""
