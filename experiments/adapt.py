"""Continued pre-training of a checkpoint on text of your own, with the checkpoint's vocabulary or an extended one.

    bertjax prepare --input prose:'texts/*.txt' --vocab runs/base --output runs/domain
    bertjax train --config experiments/adapt.py:corpus=runs/domain --init_from runs/base --workdir runs/adapted

The checkpoint sets the architecture. The vocabulary of the corpus may extend the checkpoint's vocabulary. The embedding
of an added piece then starts as the mean embedding of the pieces into which the old vocabulary splits it.

The objective is masked LM on running text, because most published encoders have no next-sentence head. The learning
rate warms up over a tenth of the steps to 1e-4, the peak of the original pre-training, and decays linearly to 0. If the
checkpoint lacks a masked-LM head, the first third of the steps trains only this head, because the gradients of a random
head may make the encoder worse (arXiv 2202.10054).

`replay=DIR:SHARE` draws the fraction SHARE of the batches from a general corpus with the same vocabulary, so that the
model forgets less of its previous training. The run then evaluates on held-out text of both corpora.

Hardware and time: depends on the checkpoint; `bertjax bench step` with the same config and `size=` prints the tokens/s
of this machine. The 10,000 steps are 41 million tokens.
Expected: depends on the text; the final table shows perplexity and bits per byte on held-out text before and after.
Fine-tune with and without adaptation, because adaptation can also lower accuracy (docs/results/published.md).
"""

from ml_collections import ConfigDict

from bertjax.errors import UsageError
from bertjax.presets import arguments, finetuning_config


@arguments(corpus="", replay="", steps=10000, seq_len=128, size="", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `corpus=DIR,replay=DIR:SHARE,steps=10000,seq_len=128,size=SIZE,quick=false`."""
    config = finetuning_config("adaptation", args.size)
    config.data.update({"corpus": args.corpus, "seq_len": args.seq_len, "batch_size": 32, "eval_rows": 1024})
    if args.replay:
        config.data.replay_corpus, config.data.replay_share = _replay(args.replay)
    config.update({"steps": args.steps, "log_every": 100, "eval_every": 1000, "checkpoint_every": 1000})
    config.optimizer.update({"learning_rate": 1e-4, "warmup_steps": -1, "head_steps": -1})
    if args.quick:
        config.update({"steps": 10, "log_every": 5, "eval_every": 5, "checkpoint_every": 5})
        config.data.update({"batch_size": 8, "eval_rows": 32})
    return config


def _replay(text: str) -> tuple[str, float]:
    """Parses `DIR:SHARE`."""
    folder, _, share = text.rpartition(":")
    try:
        return folder, float(share)
    except ValueError:
        raise UsageError(f"replay={text} lacks a share; write replay=DIR:SHARE, such as {text}:0.2") from None
