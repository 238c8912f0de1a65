"""proxyloader: decode and augment images on the GPU by changing one import.

    from proxyloader import DataLoader      # was: from torch.utils.data import DataLoader

Importing this package loads neither torch nor DALI and touches no CUDA; using a name loads what it needs. It sets one
variable of the environment, CUDA_DEVICE_MAX_CONNECTIONS, unless you have: see NOTE [ Queues ] in device.py.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import pipelines as pipelines
    from .dataset import wrap as wrap
    from .errors import ImageError as ImageError
    from .errors import InputError as InputError
    from .errors import MissingDaliError as MissingDaliError
    from .errors import PipelineError as PipelineError
    from .errors import ProxyLoaderError as ProxyLoaderError
    from .errors import UnsupportedTransformError as UnsupportedTransformError
    from .explanation import explain as explain
    from .loader import DataLoader as DataLoader
    from .reader import FileReaderLoader as FileReaderLoader
    from .sample import EncodedImage as EncodedImage
    from .server import ProxyServer as ProxyServer
    from .sharding import LastBatchPolicy as LastBatchPolicy
    from .sharding import ShardedSampler as ShardedSampler
    from .transforms import compile_transforms as compile_transforms
    from .world import World as World

__version__ = "0.1.0"

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_HOMES = {
    "DataLoader": "loader",
    "EncodedImage": "sample",
    "FileReaderLoader": "reader",
    "ImageError": "errors",
    "InputError": "errors",
    "LastBatchPolicy": "sharding",
    "MissingDaliError": "errors",
    "PipelineError": "errors",
    "ProxyLoaderError": "errors",
    "ProxyServer": "server",
    "ShardedSampler": "sharding",
    "UnsupportedTransformError": "errors",
    "World": "world",
    "compile_transforms": "transforms",
    "explain": "explanation",
    "pipelines": "pipelines",
    "wrap": "dataset",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f".{_HOMES[name]}", __name__)
    return home if name == _HOMES[name] else getattr(home, name)


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*_HOMES})
