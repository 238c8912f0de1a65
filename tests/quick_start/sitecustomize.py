"""Python imports this when it starts, in each process that the tests start: their folder is on ``PYTHONPATH``.

Most of such a process's time goes into the import of torch, and into its end. Both are mostly the garbage collector's,
which looks again and again at objects that stay.

And as in the process of the tests, small images go to DALI on a CPU, too: ``small_images_go_to_dali`` in conftest.py.
"""

import atexit
import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)  # the first one registered is the last one called, so it sees what all others leave


class _SmallImagesGoToDali:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "proxyloader.transforms.resize" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                module.Resize.needs_kernels = False

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _SmallImagesGoToDali())  # type: ignore[arg-type]
