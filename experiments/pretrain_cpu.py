"""A small BERT from scratch on two CPU cores: enough text to see both objectives being learnt.

    bertjax prepare --input wiki:'wikipedia/A[AB]/*' --vocab_size 8192 --uncased --heldout 0.005 --output runs/corpus
    bertjax train --config experiments/pretrain_cpu.py:corpus=runs/corpus --workdir runs/small

Hardware and time: two CPU cores, float32: 59 minutes on a machine that did other work too, for 24,000 steps of 1,024
tokens, the last tenth of them at length 256; between 9,100 and 9,800 tokens/s while nothing else ran.
Expected: on 200 MB of Wikipedia, held out: masked-LM loss 4.60 (7.04 without context), accuracy 0.277 (0.047),
next-sentence accuracy 0.744 (0.601).

It differs from the paper's setting where so short a run asks for it: no dropout, and many small steps. On the first 1.2
million tokens of the same corpus, masked-LM loss came to 6.73 with 4,096 tokens a batch at a rate of 1e-3, 6.67 with a
`b2` of 0.98, and 6.59 with 1,024 tokens a batch, that `b2` and a rate of 4e-4; at 1e-3 so small a batch learnt nothing
but how frequent each piece is (7.07). These were `experiments/pretrain.py:size=L2_H256,seq_len=32` without dropout, in
float32, with `--config.data.batch_size=128` or 32, `--config.optimizer.warmup_steps=100` and `--config.steps=4000`,
stopped after 300 or 1,200 steps.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, pretraining_config


@arguments(size="L2_H256", corpus="", steps=24000, quick=False)
def get_config(given: ConfigDict) -> ConfigDict:
    """The config for `size=L2_H256,corpus=DIR,steps=24000,quick=false`."""
    config = pretraining_config(given.size)
    config.data.corpus = given.corpus
    config.data.seq_len = 64
    config.data.batch_size = 16
    config.data.eval_rows = 1024
    config.long_phase.share = 0.1
    config.long_phase.seq_len = 256
    config.steps = 10 if given.quick else given.steps
    config.log_every = 5 if given.quick else 200
    config.eval_every = 5 if given.quick else 4000
    config.checkpoint_every = 5 if given.quick else 2000
    config.optimizer.learning_rate = 4e-4
    config.optimizer.b2 = 0.98
    config.optimizer.warmup_steps = max(1, config.steps // 24)
    config.model.hidden_dropout_prob = 0.0
    config.model.attention_probs_dropout_prob = 0.0
    if given.quick:
        config.data.batch_size = 8
        config.data.eval_rows = 32
    return config
