"""Where tests keep the compiled kernel: the user's cache, so that it is compiled once for all runs."""

from __future__ import annotations

import os

from engine.native.build import user_cache

KERNEL_CACHE = user_cache(os.environ)
