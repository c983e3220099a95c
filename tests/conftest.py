"""What every test relies on."""

from __future__ import annotations

import os
import signal

# A shell starts background jobs with Ctrl-C ignored, nohup with SIGHUP ignored, and children inherit that: the tests
# that interrupt a command would wait for ever when the whole run is such a job.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Whoever runs the tests may export telemetry; services that record nothing, or elsewhere, are what the tests expect.
for name in [name for name in os.environ if name.startswith("OTEL_")]:
    del os.environ[name]
