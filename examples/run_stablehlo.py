"""Runs a StableHLO file that `bertjax export` wrote. Needs jax, flatbuffers, tokenizers and NumPy, but not bertjax.

    python examples/run_stablehlo.py topic.stablehlo "a text" "another text"

Prints the outputs as JSON. The tokenizer file, `topic.tokenizer.json`, sets truncation and padding. If the model has a
prompt, such as "query: ", write it before each text. For multiple choice, the texts are the choices of one example. JAX
compiles the function for each new batch shape, so pad texts to few different lengths.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

file, *texts = sys.argv[1:]
tokenizer = Tokenizer.from_file(str(Path(file).with_suffix(".tokenizer.json")))
exported = jax.export.deserialize(bytearray(Path(file).read_bytes()))

rows = tokenizer.encode_batch(texts)
arrays = [[getattr(row, name) for row in rows] for name in ("ids", "attention_mask", "type_ids")]
# Models without segments have two inputs. Models for multiple choice take [batch, choices, length].
inputs = [
    np.array(array, np.int32).reshape((1, -1, len(rows[0]))[-each.ndim :])
    for each, array in zip(exported.in_avals, arrays, strict=False)
]
outputs = jax.device_get(jax.jit(exported.call)(*inputs))
print(json.dumps({name: array.tolist() for name, array in outputs.items()}))
