import pytest
from pretending import Pretended


@pytest.fixture
def pretended(tmp_path) -> Pretended:
    return Pretended(tmp_path)
