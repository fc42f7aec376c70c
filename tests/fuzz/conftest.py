"""How much is tried: a fixed sample in every run of the tests, and any amount by ``make fuzz``."""

from hypothesis import HealthCheck, settings

from distributed.conftest import world

__all__ = ["world"]  # the fixture that runs a function on several ranks

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
settings.load_profile("ci")
