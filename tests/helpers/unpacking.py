"""Helpers that concatenate batches, undo masking, and unpack packed rows."""

from collections.abc import Mapping, Sequence

import numpy as np


def joined(batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the rows of all batches as one batch."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def unmasked_ids(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the token ids of all rows before masking."""
    ids = batch["input_ids"].copy()
    row, column = np.nonzero(batch["masked_lm_weights"])
    ids[row, batch["masked_lm_positions"][row, column]] = batch["masked_lm_ids"][row, column]
    return ids


def unpacked(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the pairs or documents of packed rows, in order, as a batch with one per row."""
    rows: dict[str, list[np.ndarray]] = {}
    length, predictions = batch["input_ids"].shape[1], batch["masked_lm_ids"].shape[1]
    has_labels = (batch["next_sentence_labels"] >= 0).any()
    for row, labels in enumerate(batch["next_sentence_labels"]):
        for number, label in enumerate(labels, 1):
            here = np.flatnonzero(batch["sequence_ids"][row] == number)
            assert (label >= 0) == (here.size > 0 and has_labels)
            if here.size == 0:
                continue
            assert here[-1] - here[0] == here.size - 1
            np.testing.assert_array_equal(batch["position_ids"][row, here], np.arange(here.size))
            positions = batch["masked_lm_positions"][row]
            mine = (batch["masked_lm_weights"][row] > 0) & (positions >= here[0]) & (positions <= here[-1])
            parts = {
                "input_ids": (batch["input_ids"][row, here], length),
                "input_mask": (np.ones(here.size, np.int32), length),
                "segment_ids": (batch["segment_ids"][row, here], length),
                "masked_lm_positions": (positions[mine] - here[0], predictions),
                "masked_lm_ids": (batch["masked_lm_ids"][row, mine], predictions),
                "masked_lm_weights": (batch["masked_lm_weights"][row, mine], predictions),
            }
            for name, (values, width) in parts.items():
                rows.setdefault(name, []).append(np.pad(values, (0, width - values.size)))
            rows.setdefault("next_sentence_labels", []).append(label)
    return {name: np.stack(values) for name, values in rows.items()}
