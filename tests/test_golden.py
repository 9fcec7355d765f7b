"""Batches and converted checkpoints are bitwise equal to those of version 0.1 (see `golden.py`).

If a change is intended, explain it in the commit message, and replace the hashes with the output of
`python tests/golden.py`.
"""

import golden

BATCHES = {
    "pairs at 128": "80972983eaee36a0",
    "pairs at 512": "a5d8fc80f774c90e",
    "packed pairs": "9775b343db8f4b05",
    "packed pairs at 512": "dbf3be5310658817",
    "spans at 128": "6a85a742f67c58a6",
    "whole words": "334adb8c330f6942",
    "two phases": "0b6fe21c77e1104e",
    "cola": "bcfa2c03bbb12374",
    "rte": "957f7d5d4bdc9528",
    "stsb": "56410e8b7da90b3b",
    "squad": "a467ca2955fd2f67",
    "ner": "fcad160dcba94e54",
    "swag": "976cf418e469716f",
}
CONVERTED = {"bertjax": "159660ca7b344b1e", "huggingface": "b172346abc44ebe2"}


def test_batches_have_the_recorded_hashes(tmp_path):
    assert golden.batch_hashes(golden.prepare_data(tmp_path), tmp_path) == BATCHES


def test_converted_checkpoints_have_the_recorded_hashes(tmp_path):
    vocabulary = golden.write_vocabulary(tmp_path / "vocab.txt")
    assert golden.converted_hashes(tmp_path, vocabulary) == CONVERTED
