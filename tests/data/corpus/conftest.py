import pytest
from preparing import WORDS

from bertjax.data.corpus.vocabulary import SPECIAL_PIECES


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    path.write_text("\n".join([*SPECIAL_PIECES, *WORDS, *letters, *(f"##{c}" for c in letters), "."]) + "\n")
    return path
