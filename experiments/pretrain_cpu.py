"""A Mini BERT from scratch on two CPU cores: enough text to see both objectives being learnt.

    bertjax prepare --input wiki:'wikipedia/AA/*' prose:'novels/*.txt' --vocab vocab.txt --output runs/corpus
    bertjax train --config experiments/pretrain_cpu.py:corpus=runs/corpus --workdir runs/mini

Hardware and time: two CPU cores, float32, 3,700 to 4,200 tokens/s: 70 minutes for 4,000 steps of 32 x 128 tokens.
Expected: on 100 MB of Wikipedia and 90 novels, held out: masked-LM loss 6.70 (7.32 without context, unigram entropy
7.04), accuracy 0.132 (0.046), next-sentence accuracy 0.614 (0.531).

It differs from the paper's setting where a run that sees each sentence once at most asks for it: no dropout, a
learning rate of 1e-3, and 400 steps of warm-up.
"""

from ml_collections import ConfigDict

from bertjax.config import parse_arguments
from bertjax.fields import pretraining_config


def get_config(arguments: str | None = None) -> ConfigDict:
    """The config for `size=mini,corpus=DIR,steps=4000,quick=false`."""
    given = parse_arguments(arguments, size="mini", corpus="", steps=4000, quick=False)
    config = pretraining_config(given.size)
    config.data.corpus = given.corpus
    config.data.batch_size = 32
    config.data.eval_rows = 1024
    config.steps = 10 if given.quick else given.steps
    config.log_every = 5 if given.quick else 50
    config.eval_every = 5 if given.quick else 400
    config.checkpoint_every = 5 if given.quick else 400
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = config.steps // 10
    config.model.dtype = "float32"
    config.model.hidden_dropout = 0.0
    config.model.attention_dropout = 0.0
    if given.quick:
        config.data.batch_size = 8
        config.data.eval_rows = 32
    return config
