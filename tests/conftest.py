from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("paceline", deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")
