"""Pre-training of the Ettin encoders (arXiv 2507.11412): ModernBERT's architecture and recipe in six sizes.

    bertjax prepare --input text:'texts/*.txt' --vocab_kind bpe --vocab_size 50280 --output corpus
    bertjax describe --config experiments/ettin.py:size=17m --config.model.vocab_size=50368
    bertjax plan --config experiments/ettin.py:size=17m --config.grad_accum_steps=9 --topology v5e:4x4
    bertjax train --config experiments/ettin.py:size=17m,corpus=corpus --workdir runs/ettin

The sizes are `17m`, `32m`, `68m`, `150m`, `400m`, `1b`, or a name such as `L4_H256`. The run has 2 trillion tokens, in
phases:

1. 1.7 trillion tokens in rows of 1,024 tokens with theta 10,000; at first, batches grow to 4,608 rows
2. 250 billion tokens in rows of 7,999 tokens, with theta 160,000
3. 50 billion tokens with 15 % masks; the learning rate starts at half of its peak and decays to 0 as 1 - sqrt

Documents are packed into rows, without attention between them.

Differences from the paper: the learning rate of the second phase is constant and does not decay to half. The matrices
that write to the residual stream have the same initial standard deviation as others. There is no dropout of attention
outputs.

Hardware and time: in the paper, 564 H100-hours for 17M.
Expected: 16,913,600, 32,081,344, 68,457,664, 149,655,232, 395,881,664 and 1,031,314,112 parameters, and an average GLUE
dev score of 79.2 (17M), 83.5 (32M), 87.2 (68M), 88.9 (150M) and 90.8 (400M).
"""

from ml_collections import ConfigDict

from bertjax.convert.modernbert import MODERNBERT
from bertjax.presets import arguments, make_quick, modernbert_config, phase_of

# Number of layers, hidden size and feed-forward size, as in the configs of JHU-CLSP/ettin-encoder-vs-decoder.
_SHAPES = {
    "17m": (7, 256, 384),
    "32m": (10, 384, 576),
    "68m": (19, 512, 768),
    "150m": (22, 768, 1152),
    "400m": (28, 1024, 2624),
    "1b": (28, 1792, 3840),
}
# Learning rate, weight decay, and tokens of the batch ramp and of warm-up. Other sizes use the values of 150M.
_RECIPES = {
    "17m": (3e-3, 3e-4, 125e9, 4e9),
    "32m": (3e-3, 3e-4, 100e9, 4e9),
    "68m": (3e-3, 3e-4, 75e9, 3e9),
    "150m": (8e-4, 1e-5, 50e9, 3e9),
    "400m": (5e-4, 1e-5, 10e9, 2e9),
    "1b": (5e-4, 5e-5, 3e9, 2e9),
}
# All batch sizes are multiples of the first, so the same number of devices and micro-batches can divide them all.
_RAMP = (576, 1152, 2304)


@arguments(size="150m", corpus="", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `size=150m,corpus=DIR,quick=false`."""
    rate, decay, ramp_tokens, warmup_tokens = _RECIPES.get(args.size, _RECIPES["150m"])
    config = modernbert_config(args.size, _SHAPES, MODERNBERT.values, args.quick)
    config.model.max_position_embeddings = 7999
    config.data.update({"corpus": args.corpus, "batch_size": 4608})
    config.optimizer.update({"learning_rate": rate, "weight_decay": decay})
    thetas = {"global_rope_theta": 160_000.0, "local_rope_theta": 160_000.0}
    config.phases = (
        *(phase_of(ramp_tokens / len(_RAMP), rows, 1024) for rows in _RAMP),
        phase_of(1700e9 - ramp_tokens, 4608, 1024),
        phase_of(250e9, 576, 7999, **thetas),
        phase_of(50e9, 576, 7999, **thetas, learning_rate=rate / 2, mask_rate=0.15),
    )
    config.steps = round(sum(phase["share"] for phase in config.phases))
    config.optimizer.warmup_steps = round(warmup_tokens / (_RAMP[0] * 1024))
    config.optimizer.decay_steps = round(config.phases[-1]["share"])
    if args.quick:
        make_quick(config, 64)
        config.optimizer.decay_steps = 2
    return config
