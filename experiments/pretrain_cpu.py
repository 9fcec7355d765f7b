"""Pre-training of a small BERT on two CPU cores, with enough text to learn both objectives.

    bertjax prepare --input wiki:'wikipedia/A[AB]/*' --vocab_size 8192 --uncased --heldout 0.005 --output runs/corpus
    bertjax train --config experiments/pretrain_cpu.py:corpus=runs/corpus --workdir runs/small

Hardware and time: two CPU cores, float32, 59 minutes on a machine that also ran other work. The run has 24,000 steps of
1,024 tokens, the last tenth at length 256. Without other work, the speed was between 9,100 and 9,800 tokens/s. To
reproduce these numbers, add `--config.model.dtype=float32`: CPUs with bfloat16 units train in bfloat16 by default.
Expected: on text held out from 200 MB of Wikipedia, masked-LM loss 4.60 (baseline: 7.04), masked-LM accuracy 0.277
(baseline: 0.047) and next-sentence accuracy 0.744 (baseline: 0.601).

A run this short works best without dropout and with many small steps. The masked-LM loss after the first 1.2 million
tokens of the same corpus was:

- 6.73 with 4,096 tokens per batch and learning rate 1e-3
- 6.67 with 4,096 tokens per batch, learning rate 1e-3 and `b2` 0.98
- 6.59 with 1,024 tokens per batch, learning rate 4e-4 and `b2` 0.98
- 7.07 with 1,024 tokens per batch and learning rate 1e-3; the model learned only token frequencies

These runs used `experiments/pretrain.py:size=L2_H256,seq_len=32` in float32 without dropout, with
`--config.data.batch_size=128` or 32, `--config.optimizer.warmup_steps=100` and `--config.steps=4000`. They were stopped
after 300 or 1,200 steps.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, pretraining_config


@arguments(size="L2_H256", corpus="", steps=24000, quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `size=L2_H256,corpus=DIR,steps=24000,quick=false`."""
    config = pretraining_config(args.size)
    config.data.update({"corpus": args.corpus, "seq_len": 64, "batch_size": 16, "eval_rows": 1024})
    config.phases = ({"share": 0.9}, {"share": 0.1, "seq_len": 256})
    config.update({"steps": args.steps, "log_every": 200, "eval_every": 4000, "checkpoint_every": 2000})
    config.model.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    if args.quick:
        config.update({"steps": 10, "log_every": 5, "eval_every": 5, "checkpoint_every": 5})
        config.data.update({"batch_size": 8, "eval_rows": 32})
    config.optimizer.update({"learning_rate": 4e-4, "b2": 0.98, "warmup_steps": max(1, config.steps // 24)})
    return config
