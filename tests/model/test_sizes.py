"""Parameter counts of all published sizes, from abstract shapes."""

import flax.linen as nn
import jax
import pytest

from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig, size_fields
from bertjax.tasks.objectives.masked_lm import MaskedLm

# The 24 small models of google-research/bert (30,522 pieces): parameters without and with the pre-training heads.
SMALL = {
    "L2_H128": (4_385_920, 4_433_468),
    "L2_H256": (9_591_040, 9_688_380),
    "L2_H512": (22_458_880, 22_754_108),
    "L2_H768": (38_603_520, 39_227_708),
    "L4_H128": (4_782_464, 4_830_012),
    "L4_H256": (11_170_560, 11_267_900),
    "L4_H512": (28_763_648, 29_058_876),
    "L4_H768": (52_779_264, 53_403_452),
    "L6_H128": (5_179_008, 5_226_556),
    "L6_H256": (12_750_080, 12_847_420),
    "L6_H512": (35_068_416, 35_363_644),
    "L6_H768": (66_955_008, 67_579_196),
    "L8_H128": (5_575_552, 5_623_100),
    "L8_H256": (14_329_600, 14_426_940),
    "L8_H512": (41_373_184, 41_668_412),
    "L8_H768": (81_130_752, 81_754_940),
    "L10_H128": (5_972_096, 6_019_644),
    "L10_H256": (15_909_120, 16_006_460),
    "L10_H512": (47_677_952, 47_973_180),
    "L10_H768": (95_306_496, 95_930_684),
    "L12_H128": (6_368_640, 6_416_188),
    "L12_H256": (17_488_640, 17_585_980),
    "L12_H512": (53_982_720, 54_277_948),
    "L12_H768": (109_482_240, 110_106_428),
}
NAMED = {
    "tiny": SMALL["L2_H128"],
    "mini": SMALL["L4_H256"],
    "small": SMALL["L4_H512"],
    "medium": SMALL["L8_H512"],
    "base": SMALL["L12_H768"],
    "large": (335_141_888, 336_226_108),
}
# Layers, hidden size and attention heads of Table 6 of the paper; parameters of encoder and pooler.
TABLE_6 = {
    "L3_H768_A12": 45_691_392,
    "L6_H768_A3": 66_955_008,
    "L6_H768_A12": 66_955_008,
    "L12_H768_A12": 109_482_240,
    "L12_H1024_A16": 183_987_200,
    "L24_H1024_A16": 335_141_888,
}
OTHER_VOCABULARIES = {
    ("base", 28_996): (108_310_272, 108_932_934),
    ("large", 28_996): (333_579_264, 334_661_958),
    ("base", 119_547): (177_853_440, 178_566_653),
    ("base", 105_879): (167_356_416, 168_055_961),
    ("base", 21_128): (102_267_648, 102_882_442),
}


def parameter_counts(size: str, vocab_size: int = 30_522) -> tuple[int, int]:
    masked_lm = MaskedLm.for_model(ModelConfig(**size_fields(size), vocab_size=vocab_size, pad_vocab_to_multiple_of=1))
    params = nn.unbox(jax.eval_shape(masked_lm.init_params, jax.random.key(0)))

    def count(tree: dict) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    return count(params["encoder"]) + count(params["pooler"]), count(params)


@pytest.mark.parametrize(("size", "expected"), [*SMALL.items(), *NAMED.items()])
def test_published_sizes_have_the_published_parameter_counts(size, expected):
    assert parameter_counts(size) == expected


@pytest.mark.parametrize(("size", "expected"), TABLE_6.items())
def test_sizes_of_table_6_have_expected_parameter_counts(size, expected):
    assert parameter_counts(size)[0] == expected
    heads = int(size.split("_A")[1])
    assert size_fields(size)["num_attention_heads"] == heads


@pytest.mark.parametrize(("model", "expected"), OTHER_VOCABULARIES.items())
def test_models_with_other_vocabularies_have_the_published_parameter_counts(model, expected):
    assert parameter_counts(*model) == expected


@pytest.mark.parametrize("size", ["huge", "L4", "L4_H256_B2", "L12_H768_A7", "L0_H64"])
def test_invalid_sizes_are_refused(size):
    with pytest.raises(UsageError):
        ModelConfig(**size_fields(size))
