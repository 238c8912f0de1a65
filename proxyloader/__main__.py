"""Entry point of ``python -m proxyloader``, which runs the command ``proxyloader``."""

import sys

from .tools.cli import main

if __name__ == "__main__":  # spawned worker processes import this module, too
    sys.exit(main())
