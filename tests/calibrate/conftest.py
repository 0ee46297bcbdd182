"""A calibrated folder and a tiny model's folder, shared by the tests of this package."""

import json

import pytest

from tests.calibrate.cpu import TINY, folder


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("calibrated") / "mine")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    return path
