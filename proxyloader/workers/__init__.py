"""torch's worker processes, and the memory that they share with the main process."""

__all__ = ["fetch", "loader_state", "masks", "messages", "packing", "pool", "request_sampler"]
