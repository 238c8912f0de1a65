"""The parts of DALI that are used to build graphs, including private names and names that differ between versions.

Private names of pipelines are in ``executor.py``. Importing this module imports DALI. ``tests/dali/test_api.py`` checks
every such name against the installed DALI.

NOTE [ Headers that DALI cannot parse ]
DALI's image decoder reads the headers of a batch in several threads. If it cannot parse one of them, it returns without
waiting for the other threads, which continue in freed memory and sometimes crash the process (DALI 2.4, on a CPU). An
image that fails later, while its pixels are decoded, is harmless. So workers never pass a JPEG to DALI whose header
DALI cannot parse: ``data/jpeg.py`` rejects every unusual header, and Pillow decodes these images.
"""

import importlib
from typing import Any

from ..errors import MissingDaliError
from ..lifetime import defer_interrupts

with defer_interrupts():  # an interrupted import of DALI cannot be repeated in this process
    try:
        from nvidia.dali import OperatorConcurrency as OperatorConcurrency
        from nvidia.dali import Pipeline as Pipeline
        from nvidia.dali import StreamPolicy as StreamPolicy
        from nvidia.dali import __version__ as __version__
        from nvidia.dali import backend as backend
        from nvidia.dali import fn as fn
        from nvidia.dali import pipeline_def as pipeline_def
        from nvidia.dali import types as types
        from nvidia.dali.pipeline import _shutdown_pipelines as _shutdown_pipelines
        from nvidia.dali.pipeline import do_not_convert as do_not_convert
        from nvidia.dali.plugin.pytorch.experimental.proxy import DALIServer as DALIServer
        from nvidia.dali.plugin.pytorch.experimental.proxy import (
            _external_source_node_names as _external_source_node_names,
        )
        from nvidia.dali.plugin.pytorch.torch_utils import to_torch_tensor as to_torch_tensor
    except ImportError as error:
        raise MissingDaliError(
            f"NVIDIA DALI cannot be imported ({error}). On Linux: pip install nvidia-dali-cuda120. "
            "Without it, proxyloader.DataLoader works like torch's. `proxyloader doctor` shows what is wrong"
        ) from error


def decoder_arguments(operator: str, device_id: int | None, engine_share: float) -> dict[str, Any]:
    """Return the arguments with which a decoder matches Pillow: libjpeg's upsampling, no rotation by EXIF."""
    arguments: dict[str, Any] = {"output_type": types.RGB, "jpeg_fancy_upsampling": True}
    schema: Any = backend
    if schema.GetSchema(operator).HasArgument("adjust_orientation"):  # before DALI 2 some decoders never rotate
        arguments["adjust_orientation"] = False
    placement = {"device": "cpu"} if device_id is None else {"device": "mixed", "hw_decoder_load": engine_share}
    return arguments | placement


@do_not_convert  # type: ignore[untyped-decorator,unused-ignore]
def automatic_augmentation(name: str) -> Any:
    """Return a function of ``nvidia.dali.auto_aug``. The import is slow and rarely needed."""
    module = importlib.import_module(f"nvidia.dali.auto_aug.{name.removesuffix('_wide')}")
    return getattr(module, name)
