"""Runs an ONNX file that `bertjax export` wrote. Needs onnxruntime, tokenizers and NumPy, but neither bertjax nor JAX.

    python examples/run_onnx.py topic.onnx "a text" "another text"

Prints the outputs as JSON. The tokenizer file, `topic.tokenizer.json`, sets truncation and padding. If the model has a
prompt, such as "query: ", write it before each text. For multiple choice, the texts are the choices of one example.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

file, *texts = sys.argv[1:]
tokenizer = Tokenizer.from_file(str(Path(file).with_suffix(".tokenizer.json")))
session = onnxruntime.InferenceSession(file)

rows = tokenizer.encode_batch(texts)
arrays = {
    "input_ids": np.array([row.ids for row in rows]),
    "attention_mask": np.array([row.attention_mask for row in rows]),
    "token_type_ids": np.array([row.type_ids for row in rows]),
}
# Models without segments have no `token_type_ids`. Models for multiple choice take [batch, choices, length].
inputs = {
    each.name: arrays[each.name].reshape((1, -1, len(rows[0]))[-len(each.shape) :]) for each in session.get_inputs()
}
outputs = session.run(None, inputs)
print(json.dumps({each.name: array.tolist() for each, array in zip(session.get_outputs(), outputs, strict=True)}))
