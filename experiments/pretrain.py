"""Pre-training with masked LM and next-sentence prediction, as in section 3.1 and A.2 of the paper.

    bertjax prepare --input wiki:DUMP/'*' --vocab vocab.txt --output corpus
    bertjax train --config experiments/pretrain.py:size=base,corpus=corpus --workdir runs/base

By default one phase at `seq_len`. `phases=2` is the paper's schedule: 90 % of the steps at 128 tokens, 10 % at 512,
one learning-rate schedule across. `batch=tokens` reads the paper's batch as 131,072 tokens at both lengths (1024 rows
of 128, 256 of 512), the only reading that gives its 40 epochs in a million steps; `batch=sequences` as 256 rows at
both.

Hardware and time: BASE took the paper's authors four days on 16 TPU chips, LARGE four days on 64.
Expected: next-sentence accuracy of 97-98 % at the end (paper, A.2 footnote), perplexity 3.99 for BASE and 3.23 for
LARGE on held-out text (Table 6).
"""

from ml_collections import ConfigDict

from bertjax.data.pretraining.config import check_shape
from bertjax.errors import UsageError
from bertjax.presets import arguments, pretraining_config

_TOKENS_A_BATCH = 131_072
_ROWS_A_BATCH = 256


@arguments(size="base", seq_len=128, objective="nsp", corpus="", phases=1, batch="tokens", quick=False)
def get_config(given: ConfigDict) -> ConfigDict:
    """The config for `size=base,seq_len=128,objective=nsp,corpus=DIR,phases=1,batch=tokens,quick=false`."""
    check_shape(given.seq_len, batch_size=1, max_predictions=1)
    if given.phases not in (1, 2):
        raise UsageError(f"unknown phases={given.phases}; use 1, or 2 for the paper's schedule")
    if given.batch not in ("tokens", "sequences"):
        raise UsageError(f"unknown batch={given.batch}; use tokens or sequences")
    config = pretraining_config(given.size)
    config.data.corpus = given.corpus
    config.data.seq_len = given.seq_len
    config.data.objective = given.objective
    config.data.batch_size = _TOKENS_A_BATCH // given.seq_len if given.batch == "tokens" else _ROWS_A_BATCH
    config.long_phase.share = 0.1 if given.phases == 2 else 0.0
    config.long_phase.keep_tokens_per_batch = given.batch == "tokens"
    if given.quick:
        config.steps = 20
        config.log_every = 5
        config.eval_every = 10
        config.checkpoint_every = 10
        config.optimizer.warmup_steps = 5
        config.data.batch_size = 8
        config.data.eval_rows = 64
    return config
