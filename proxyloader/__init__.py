"""proxyloader: decode and augment images on the GPU by changing one import.

    from proxyloader import DataLoader      # was: from torch.utils.data import DataLoader

Importing this package loads neither torch nor DALI and does not initialize CUDA. Using a name loads what it needs. The
import sets one environment variable, CUDA_DEVICE_MAX_CONNECTIONS, unless it is set already or
PROXYLOADER_KEEP_ENVIRONMENT=1 is set. NOTE [ CUDA queues ] in dali/device.py says why.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import pipelines
    from .dali.server import ProxyServer
    from .data.bad_samples import ForeignImageError, LargeImageError, MissingImageError
    from .data.dataset import wrap
    from .data.remote_folder import RemoteImageFolder
    from .data.sharded_sampler import LastBatchPolicy, ShardedSampler, World
    from .errors import ImageError, InputError, MissingDaliError, PipelineError, ProxyLoaderError
    from .loader.dataloader import DataLoader
    from .loader.stats import LoaderStats
    from .tools.diagnose import diagnose, diagnosis
    from .tools.explain import explain

__all__ = ["DataLoader", "ForeignImageError", "ImageError", "InputError", "LargeImageError", "LastBatchPolicy"]
__all__ += ["LoaderStats", "MissingDaliError", "MissingImageError", "PipelineError", "ProxyLoaderError", "ProxyServer"]
__all__ += ["RemoteImageFolder", "ShardedSampler", "World", "diagnose", "diagnosis", "explain", "pipelines", "wrap"]

__version__ = "0.1.0"

if os.environ.get("PROXYLOADER_KEEP_ENVIRONMENT") != "1":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_NAMES = {
    "dali.server": ["ProxyServer"],
    "data.bad_samples": ["ForeignImageError", "LargeImageError", "MissingImageError"],
    "data.dataset": ["wrap"],
    "data.remote_folder": ["RemoteImageFolder"],
    "data.sharded_sampler": ["LastBatchPolicy", "ShardedSampler", "World"],
    "errors": ["ImageError", "InputError", "MissingDaliError", "PipelineError", "ProxyLoaderError"],
    "loader.dataloader": ["DataLoader"],
    "loader.stats": ["LoaderStats"],
    "pipelines": ["pipelines"],
    "tools.diagnose": ["diagnose", "diagnosis"],
    "tools.explain": ["explain"],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f".{_HOMES[name]}", __name__)
    return home if name == _HOMES[name] else getattr(home, name)


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*_HOMES})
