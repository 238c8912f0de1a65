"""Python imports this when it starts, in each process that the tests start: their folder is on ``PYTHONPATH``.

Most of such a process's time goes into the import of torch, and into its end. Both are mostly the garbage collector's,
which looks again and again at objects that stay.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)  # the first one registered is the last one called, so it sees what all others leave
