"""A dataset of synthetic photographs: the public name of ``tools/synthetic/dataset.py``."""

from .tools.synthetic.dataset import make_dataset

__all__ = ["make_dataset"]
