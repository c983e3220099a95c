"""Runs a service's module as a child that never outlives its parent: `python -m foveate.child MODULE ARGS...`.

The parent holds the other end of this process's stdin. However the parent ends, SIGKILL included, the kernel closes
it; the child then terminates itself as if asked to, so that it drains and unlinks its shared memory. (PR_SET_PDEATHSIG
would fire when the *thread* that started the child ends.)
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import time

ORPHAN_GRACE_S = 10.0


def main() -> None:
    """Watches the parent and becomes the module that argv names."""
    _, module, *arguments = sys.argv
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        _exit(ended)
    _exit(SystemExit())


def _exit(ended: SystemExit) -> None:
    # Taking the engine's modules apart costs a second of CPU that nobody needs; the exit functions still run.
    if isinstance(ended.code, str):
        sys.stderr.write(f"{ended.code}\n")
    code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    while os.read(sys.__stdin__.fileno() if sys.__stdin__ else 0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
