"""DataLoader: the training loop's side. Main process."""

__all__ = ["dataloader", "stats"]
