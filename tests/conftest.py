"""Settings of all tests: a busy machine must not fail a property test."""

from hypothesis import settings

settings.register_profile("planner", deadline=None)
settings.load_profile("planner")
