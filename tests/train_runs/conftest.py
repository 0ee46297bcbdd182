from __future__ import annotations

from pathlib import Path

import pytest

from tests.train_runs.tinymodel import make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    make(folder)
    return folder
