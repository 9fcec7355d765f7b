"""Pre-training of NeoBERT (arXiv 2502.19587): 28 layers of BERT's width, SwiGLU, RMSNorm, 20 % masks.

    bertjax prepare --input text:'texts/*.txt' --vocab vocab.txt --output corpus
    bertjax describe --config experiments/neobert.py
    bertjax plan --config experiments/neobert.py --config.grad_accum_steps=16 --topology v5e:4x4
    bertjax train --config experiments/neobert.py:corpus=corpus --workdir runs/neobert

The run has a million steps on rows of 1,024 tokens, then 50,000 steps on rows of 4,096 tokens, with 2.1 million tokens
per batch and one cosine schedule. All predicted tokens become [MASK]. `size` is a number of layers and a hidden size,
such as `L12_H768`.

Differences from the paper: rows are running text, in which attention crosses document boundaries, and the learning rate
decays to 0 instead of a tenth of its peak.

Hardware and time: in the paper, 6,000 GPU-hours on 8 H100.
Expected: 245,136,954 parameters (250M in the paper), and an average GLUE dev score of 89.0.
"""

from ml_collections import ConfigDict

from bertjax.convert.neobert import NEOBERT
from bertjax.presets import arguments, make_quick, phase_of, pretraining_config

_TOKENS_PER_BATCH = 2**21


@arguments(size="L28_H768", corpus="", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `size=L28_H768,corpus=DIR,quick=false`."""
    config = pretraining_config("L4_H128" if args.quick else args.size)
    config.model.update({**NEOBERT.values, "model_type": "neobert", "max_position_embeddings": 4096})
    # SwiGLU has three matrices. With two thirds of the width, they have as many parameters as the usual two.
    config.model.intermediate_size = -(-config.model.intermediate_size * 2 // 3 // 8) * 8
    config.data.update({"corpus": args.corpus, "objective": "none", "seq_len": 1024})
    config.data.batch_size = _TOKENS_PER_BATCH // 1024
    config.data.masking.update({"rate": 0.2, "mask_prob": 1.0, "keep_prob": 0.0, "random_prob": 0.0})
    config.optimizer.update(
        {"name": "adamw", "learning_rate": 6e-4, "schedule": "cosine", "warmup_steps": 2000, "weight_decay": 0.01}
    )
    config.optimizer.update({"b2": 0.95, "eps": 1e-8})
    config.phases = (
        phase_of(1e6 * _TOKENS_PER_BATCH, _TOKENS_PER_BATCH // 1024, 1024),
        phase_of(5e4 * _TOKENS_PER_BATCH, _TOKENS_PER_BATCH // 4096, 4096),
    )
    config.steps = 1_050_000
    if args.quick:
        make_quick(config, 64)
    return config
