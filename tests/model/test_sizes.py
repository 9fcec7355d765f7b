"""Parameter counts of all published sizes, from abstract shapes."""

import flax.linen as nn
import jax
import pytest

from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig, size_fields
from bertjax.tasks.objectives.masked_lm import MaskedLm

# Published models: size, vocabulary size, parameter counts of encoder with pooler and of the pre-training model.
PUBLISHED = [
    ("tiny", 30_522, 4_385_920, 4_433_468),
    ("mini", 30_522, 11_170_560, 11_267_900),
    ("small", 30_522, 28_763_648, 29_058_876),
    ("medium", 30_522, 41_373_184, 41_668_412),
    ("base", 30_522, 109_482_240, 110_106_428),
    ("large", 30_522, 335_141_888, 336_226_108),
    ("L2_H768", 30_522, 38_603_520, 39_227_708),
    ("L12_H128", 30_522, 6_368_640, 6_416_188),
    # Other vocabularies: cased, multilingual and Chinese.
    ("base", 28_996, 108_310_272, 108_932_934),
    ("large", 28_996, 333_579_264, 334_661_958),
    ("base", 119_547, 177_853_440, 178_566_653),
    ("base", 21_128, 102_267_648, 102_882_442),
    # Table 6 of the paper: layers, hidden size and attention heads. The parameters do not depend on the heads.
    ("L3_H768_A12", 30_522, 45_691_392, None),
    ("L6_H768_A3", 30_522, 66_955_008, None),
    ("L12_H1024_A16", 30_522, 183_987_200, None),
]


def parameter_counts(size: str, vocab_size: int) -> tuple[int, int]:
    masked_lm = MaskedLm.for_model(ModelConfig(**size_fields(size), vocab_size=vocab_size, pad_vocab_to_multiple_of=1))
    params = nn.unbox(jax.eval_shape(masked_lm.init_params, jax.random.key(0)))

    def count(tree: dict) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    return count(params["encoder"]) + count(params["pooler"]), count(params)


@pytest.mark.parametrize(("size", "vocab_size", "encoder", "complete"), PUBLISHED)
def test_published_sizes_have_the_published_parameter_counts(size, vocab_size, encoder, complete):
    counts = parameter_counts(size, vocab_size)
    assert counts[0] == encoder and complete in (None, counts[1])


def test_size_may_contain_the_number_of_heads():
    assert [size_fields(size)["num_attention_heads"] for size in ("L6_H768", "L6_H768_A3", "base")] == [12, 3, 12]


@pytest.mark.parametrize("size", ["huge", "L4", "L4_H256_B2", "L12_H768_A7", "L0_H64"])
def test_invalid_sizes_are_refused(size):
    with pytest.raises(UsageError):
        ModelConfig(**size_fields(size))
