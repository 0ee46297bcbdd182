import pytest

from planner.hardware.catalog import load_catalog
from planner.hardware.records import Catalog


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return load_catalog()
