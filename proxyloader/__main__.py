"""``python -m proxyloader`` is the command ``proxyloader``."""

import sys

from .tools.cli import main

if __name__ == "__main__":  # worker processes that are spawned import this module too
    sys.exit(main())
