"""Custom fine-tuning task: predicts whether a sentence is the first or last of its paragraph, or in between.

    bertjax train --config examples/custom_task.py:path=texts --init_from runs/base --workdir runs/place

The folder contains `train.txt` and `dev.txt`, with a sentence per line and blank lines between paragraphs.
"""

import dataclasses
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from bertjax.data.finetuning.examples import Examples, constant_prediction, encode_pair, make_examples
from bertjax.data.finetuning.tables import ReadStats
from bertjax.metrics.classification import scores
from bertjax.model.config import ModelConfig
from bertjax.presets import arguments, finetuning_config
from bertjax.tasks.build import TASKS
from bertjax.tasks.finetuning.config import FinetuningConfig
from bertjax.tasks.finetuning.output_layer import CLASSES, OutputLayer
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.objectives.classification import sequence_objective
from bertjax.tasks.task import Objective


@dataclasses.dataclass(frozen=True)
class PlaceConfig(FinetuningConfig):
    """Config of the task."""

    task: str = "place"


class PlaceTask(FinetuningTask):
    """Classification of the position of a sentence in its paragraph."""

    missing_data = "no data; set path=DIR to a folder with train.txt and dev.txt"
    default_metric = "accuracy"
    labels = ("first", "between", "last")

    def make_objective(self, model: ModelConfig) -> Objective:
        return sequence_objective(self.labels, model, self.class_weighting())

    def output_layer(self) -> OutputLayer:
        return OutputLayer(CLASSES, self.labels, "place", texts=1)

    def read_examples(self, split: str) -> Examples:
        file = Path(self.config.data.path) / f"{split}.txt"
        rows, labels = [], []
        for paragraph in file.read_text().split("\n\n"):
            sentences = paragraph.strip().splitlines()
            for index, sentence in enumerate(sentences):
                ids = self.tokenizer.encode(sentence)
                rows.append(encode_pair(ids, None, self.config.data.seq_len, self.vocabulary))
                labels.append(0 if index == 0 else 2 if index == len(sentences) - 1 else 1)
        self.read_stats.append(ReadStats(str(file), read=len(rows), used=len(rows)))
        return make_examples(rows, {"labels": np.array(labels, np.int32)})

    def score(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        labels = self.evaluated_examples.rows["labels"]
        return scores(["accuracy", "macro_f1"], self.ordered_logits(outputs).argmax(axis=-1), labels)

    def baseline(self) -> dict[str, float]:
        labels = self.evaluated_examples.rows["labels"]
        return scores(["accuracy", "macro_f1"], constant_prediction(labels), labels)


TASKS["place"] = PlaceConfig, PlaceTask


@arguments(path="", size="")
def get_config(args: ConfigDict) -> ConfigDict:
    config = finetuning_config("place", args.size)
    config.data.path = args.path
    return config
