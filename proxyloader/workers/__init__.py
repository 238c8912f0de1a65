"""torch's worker processes, and the memory that they share with the main process."""

__all__ = [
    "dataset_state",
    "early_draws",
    "fetch",
    "fetch_folder",
    "loader_state",
    "messages",
    "packing",
    "pool",
    "request_sampler",
    "scan_checks",
    "stock_images",
]
"""Modules that other folders may import."""
