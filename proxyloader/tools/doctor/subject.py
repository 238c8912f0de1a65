"""What is examined: the facts that several checks need, each asked for once, when it is needed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..._cores import usable_cores
from .child import Answer, ask, ask_at_once

Facts = Mapping[str, Any]

AT_ONCE = (("driver",), ("torch",), ("torchvision",), ("dali",), ("pictures", "cpu", "0"))
"""Questions whose answers do not depend on what else runs, as those about a GPU's engines do."""


class Subject:
    """A machine and its Python environment, as this process sees them.

    Args:
        limit_s: how long a child process may take for an answer, in seconds.
        root: the folder in which the system's files are looked for, such as ``proc/self/cgroup``.
    """

    def __init__(self, limit_s: float, root: Path = Path("/")) -> None:
        self.limit_s, self.root = limit_s, root
        self._answers: dict[tuple[str, ...], Answer] = {}

    def ask(self, question: str, *arguments: str) -> Answer:
        known = self._answers.get((question, *arguments))
        return known or ask(question, *arguments, limit_s=self.limit_s)

    def ask_at_once(self) -> None:
        """Ask several questions at the same time, as to import torch takes each child process seconds."""
        self._answers |= zip(AT_ONCE, ask_at_once(AT_ONCE, self.limit_s))

    @cached_property
    def driver(self) -> Answer:
        return self.ask("driver")

    @cached_property
    def torch(self) -> Answer:
        return self.ask("torch")

    @cached_property
    def torchvision(self) -> Answer:
        return self.ask("torchvision")

    @cached_property
    def dali(self) -> Answer:
        return self.ask("dali")

    @property
    def driver_cuda(self) -> list[int] | None:
        """Major and minor version of the newest CUDA that the driver runs, or None without a driver."""
        return self.driver.told[0].get("cuda") if self.driver.told else None

    @property
    def gpus_of_driver(self) -> list[Facts]:
        return list(self.driver.told[1:])

    @property
    def gpus(self) -> list[Facts]:
        """The GPUs that torch sees, in CUDA's order, with what the driver tells of them."""
        known = {gpu["uuid"].removeprefix("GPU-"): gpu for gpu in self.gpus_of_driver}
        return [{**known.get(gpu["uuid"], {}), **gpu} for gpu in self.torch.told[1:]]

    @cached_property
    def dali_builds(self) -> dict[str, str]:
        """The installed builds of DALI with their versions, such as ``{"nvidia-dali-cuda120": "2.4.0"}``."""
        found = _installed("nvidia-dali-")
        return {name: version for name, version in found.items() if "plugin" not in name}

    @cached_property
    def codec_builds(self) -> dict[str, str]:
        """The installed builds of nvImageCodec, in the same way."""
        return _installed("nvidia-nvimgcodec-")

    @property
    def cores(self) -> int:
        """The number of cores that this process may use by its affinity."""
        return usable_cores()


def _installed(prefix: str) -> dict[str, str]:
    names = [(each.metadata["Name"] or "", each.version) for each in importlib.metadata.distributions()]
    found = [(name.lower().replace("_", "-"), version) for name, version in names]
    return {name: version for name, version in found if name.startswith(prefix)}
