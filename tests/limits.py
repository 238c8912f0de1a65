"""How long something may take in a test: the one scale.

How fast the library is stands in ``benchmarks/``. A test looks at a clock only where the time is the promise, and where
a wait must end. The limits are above what is promised, for machines that are busy with other work, and below the five
seconds after which torch alone ends a worker that does not listen, or sees that one is lost. ``PROXYLOADER_PATIENCE``
multiplies them all.
"""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("PROXYLOADER_PATIENCE", "1"))

GIVEN_UP_S = 2.0 * PATIENCE
"""After which what waits for ever is given up; it must have begun by then."""

STOP_S = 4.0 * PATIENCE
"""For what stops at once: promised is under a second."""

ERROR_S = 4.5 * PATIENCE
"""Until the loss of a process is noticed: promised is under two seconds."""

LOST_S = 15.0 * PATIENCE
"""Until the loss of a worker is an error: torch looks every five seconds, and not while other workers deliver."""

WAIT_S = 50.0 * PATIENCE
"""For what is to come at some time. A wait ends when it has come, so it costs nothing where all is well."""

LONG_S = 1.2 * WAIT_S
"""A hang, as far as a test can tell; and short enough that nothing is left of it where all else fails."""
