"""torch's worker processes, and the memory that they share with the training process."""

__all__ = ["dataset_state", "fetch", "loader_state", "messages", "packing", "pool", "request_sampler"]
"""What other folders may import."""
