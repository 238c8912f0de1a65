"""The command ``proxyloader`` in this process, as ``python -m proxyloader`` runs it."""

from __future__ import annotations

import runpy
from collections.abc import Sequence

import pytest

from ..scripts import command_line

SCRIPT = "import runpy; runpy.run_module('proxyloader', run_name='__main__')"
"""The text of a script that is the command."""


def main(argv: Sequence[str]) -> int:
    """Return its exit status, also that of a usage error."""
    with command_line("proxyloader", *argv), pytest.raises(SystemExit) as ended:
        runpy.run_module("proxyloader", run_name="__main__")
    return int(ended.value.code or 0)
