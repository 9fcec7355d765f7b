"""Tests of reading labels from `output_layer.json`."""

import pytest

from bertjax.errors import UsageError
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL, TAGS, OutputLayer, saved_labels


def test_saved_labels_of_another_output_kind_are_refused(tmp_path):
    file = tmp_path / "output_layer.json"
    file.write_bytes(OutputLayer(TAGS, ("O", "B-PER"), "ner").as_json())
    assert saved_labels(str(file), TAGS) == ["O", "B-PER"]
    with pytest.raises(UsageError, match="is for tags, but the task is for classes"):
        saved_labels(str(file), CLASSES, MULTILABEL)
    file.write_text('{"labels": ["neg", "pos"]}')
    assert saved_labels(str(file), CLASSES, MULTILABEL) == ["neg", "pos"]
    for content, message in (
        ('{"labels": ["neg", "pos", "neg"]}', "a label more than once"),
        ('{"labels": "neg"}', "cannot read the output layer"),
        ("{}", "no labels"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError, match=message):
            saved_labels(str(file), CLASSES)
