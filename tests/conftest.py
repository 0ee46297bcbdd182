"""Settings of all tests: a busy machine must not fail a property test, nor a shell that started pytest in the background one of Ctrl-C."""

import signal

from hypothesis import settings

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # background jobs of a shell ignore it, and what they start inherits that

settings.register_profile("planner", deadline=None)
settings.load_profile("planner")
