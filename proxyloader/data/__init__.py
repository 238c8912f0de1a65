"""The user's dataset and what it returns: encoded images and placeholders. Runs where the dataset runs."""

__all__ = ["bad_samples", "batch_memory", "canvas", "dataset", "deferral", "encoded_image", "hooks", "jpeg"]
__all__ += ["lazy_image", "lazy_mask", "lazy_tensor", "placeholders", "recorded", "remote_folder", "sharded_sampler"]
__all__ += ["transformed"]
