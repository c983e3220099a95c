"""Property tests are not judged by their speed: a busy machine is not a bug."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("foveate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("foveate")
