"""Pre-training of a tiny BERT on docstrings, for `make demo`.

    python demo/docstrings.py runs/docs.txt
    bertjax prepare --input prose:runs/docs.txt --vocab_size 8000 --output runs/corpus
    bertjax train --config experiments/demo.py:corpus=runs/corpus --workdir runs/tiny

Hardware and time: two to four minutes on two CPU cores.
Expected: held-out masked-LM accuracy 0.181 (baseline: 0.061) and next-sentence accuracy 0.793 (baseline: 0.541).
Results depend on the installed libraries, whose docstrings are the training text. With other libraries, they were 0.186
(0.061) and 0.738 (0.563). On the smaller corpus of `make demo`, they were 0.175 (0.059) and 0.736 (0.566).
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, pretraining_config


@arguments(size="tiny", corpus="", steps=2250, quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `size=tiny,corpus=DIR,steps=2250,quick=false`."""
    config = pretraining_config(args.size)
    config.steps = 10 if args.quick else args.steps
    config.data.corpus = args.corpus
    config.data.seq_len = 64
    config.data.batch_size = 32
    config.data.dupe_factor = 2
    config.data.packing = True
    config.data.eval_rows = 512
    config.log_every = 5 if args.quick else 100
    config.eval_every = 5 if args.quick else 500
    config.checkpoint_every = 5 if args.quick else 500
    config.optimizer.learning_rate = 7e-4
    config.optimizer.warmup_steps = -1
    config.model.hidden_dropout_prob = 0.0
    config.model.attention_probs_dropout_prob = 0.0
    return config
