"""DataLoader: the training loop's side."""

__all__ = ["dataloader"]
"""What other folders may import."""
