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
    config.data.update({"corpus": args.corpus, "seq_len": 64, "batch_size": 32, "eval_rows": 512})
    config.data.update({"dupe_factor": 2, "packing": True})
    config.update({"steps": args.steps, "log_every": 100, "eval_every": 500, "checkpoint_every": 500})
    config.optimizer.update({"learning_rate": 7e-4, "warmup_steps": -1})
    config.model.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    if args.quick:
        config.update({"steps": 10, "log_every": 5, "eval_every": 5, "checkpoint_every": 5})
    return config
