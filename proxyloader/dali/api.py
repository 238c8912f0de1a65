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

__all__ = ["DALIServer", "OperatorConcurrency", "Pipeline", "StreamPolicy", "__version__", "automatic_augmentation"]
__all__ += ["backend", "decoder_arguments", "do_not_convert", "fn", "pipeline_def", "to_torch_tensor", "types"]
__all__ += ["_external_source_node_names", "_shutdown_pipelines"]

with defer_interrupts():  # an interrupted import of DALI cannot be repeated in this process
    try:
        from nvidia.dali import OperatorConcurrency, StreamPolicy, __version__, backend, fn, types
        from nvidia.dali.pipeline import Pipeline, _shutdown_pipelines, do_not_convert, pipeline_def
        from nvidia.dali.plugin.pytorch.experimental.proxy import DALIServer, _external_source_node_names
        from nvidia.dali.plugin.pytorch.torch_utils import to_torch_tensor
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
    return getattr(importlib.import_module(f"nvidia.dali.auto_aug.{name.removesuffix('_wide')}"), name)
