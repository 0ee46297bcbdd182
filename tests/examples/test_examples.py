"""Every example, run again, gives the files that stand in examples/."""

import pytest

from tests.examples.replay import EXAMPLES, names, replay


@pytest.mark.parametrize("name", names())
def test_example_is_what_its_command_gives(name):
    folder = EXAMPLES / name
    kept = {p.name: p.read_text("utf-8") for p in folder.iterdir() if p.name != "command"}
    assert replay(name) == kept, "run scripts/regenerate-examples"


def test_the_examples_that_were_promised_are_there():
    assert {"main-job", "two-rtx-4090", "comparing-clouds", "405b-on-several-nodes"} <= set(names())
