"""What every test relies on."""

from __future__ import annotations

import signal

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: the tests that interrupt a command
# would wait for ever when the whole run is such a job.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
