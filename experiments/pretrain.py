"""Pre-training with masked LM and next-sentence prediction (sections 3.1 and A.2 of the paper).

    bertjax prepare --input wiki:DUMP/'*' --vocab vocab.txt --output corpus
    bertjax train --config experiments/pretrain.py:size=base,corpus=corpus --workdir runs/base

The default is one phase with rows of `seq_len` tokens. `phases=2` is the paper's schedule: 90 % of the steps at length
128 and 10 % at 512, with one learning-rate schedule. With `batch=tokens`, a batch has 131,072 tokens at both lengths
(1024 rows of 128, 256 rows of 512). Only `batch=tokens` yields the paper's 40 epochs in a million steps. With
`batch=sequences`, a batch has 256 rows at both lengths.

`objective=rtd` pre-trains like ELECTRA (arXiv 2003.10555): all predicted tokens become [MASK] for the generator. With
`size=`, the discriminator has ELECTRA's architecture, which transformers loads as `ElectraForPreTraining`.

Hardware and time: in the paper, BASE takes four days on 16 TPU chips and LARGE four days on 64 TPU chips.
Expected: final next-sentence accuracy of 97-98 % (paper, A.2 footnote); held-out perplexity 3.99 for BASE and 3.23 for
LARGE (Table 6).
"""

from ml_collections import ConfigDict

from bertjax.data.pretraining.config import MIN_ROW_TOKENS
from bertjax.errors import UsageError
from bertjax.presets import arguments, pretraining_config

_TOKENS_PER_BATCH = 131_072
_ROWS_PER_BATCH = 256


@arguments(size="", seq_len=128, objective="nsp", corpus="", phases=1, batch="tokens", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `size=SIZE,seq_len=128,objective=nsp,corpus=DIR,phases=1,batch=tokens,quick=false`."""
    if args.seq_len < MIN_ROW_TOKENS:
        raise UsageError(f"seq_len={args.seq_len} is too short; use at least {MIN_ROW_TOKENS}")
    if args.phases not in (1, 2):
        raise UsageError(f"unknown phases={args.phases}; use 1, or 2 for the paper's schedule")
    if args.batch not in ("tokens", "sequences"):
        raise UsageError(f"unknown batch={args.batch}; use tokens or sequences")
    config = pretraining_config(args.size)
    config.data.update({"corpus": args.corpus, "seq_len": args.seq_len, "objective": args.objective})
    config.data.batch_size = _TOKENS_PER_BATCH // args.seq_len if args.batch == "tokens" else _ROWS_PER_BATCH
    if args.objective == "rtd":
        config.data.masking.update({"mask_prob": 1.0, "keep_prob": 0.0, "random_prob": 0.0})
        if args.size:
            config.model.update({"model_type": "electra", "head_act": "gelu_erf", "pooler_act": "gelu_erf"})
    if args.quick:
        config.update({"steps": 20, "log_every": 5, "eval_every": 10, "checkpoint_every": 10})
        config.optimizer.warmup_steps = 5
        config.data.update({"batch_size": 8, "eval_rows": 64})
    if args.phases == 2:
        # By default, a batch has as many tokens as in the first phase.
        rows = {} if args.batch == "tokens" else {"batch_size": config.data.batch_size}
        config.phases = ({"share": 0.9}, {"share": 0.1, "seq_len": 512, **rows})
    return config
