"""Pre-training of ModernBERT (arXiv 2412.13663): rotary positions, local attention, no biases, 30 % masks.

    bertjax prepare --input text:'texts/*.txt' --vocab_kind bpe --vocab_size 50280 --output corpus
    bertjax describe --config experiments/modernbert.py:size=base --config.model.vocab_size=50368
    bertjax plan --config experiments/modernbert.py:size=base --config.grad_accum_steps=9 --topology v5e:8x8
    bertjax train --config experiments/modernbert.py:size=base,corpus=corpus --workdir runs/modernbert

The sizes are `base`, `large`, or a name such as `L4_H256`. The run has 2 trillion tokens, in phases:

1. 50 billion tokens (BASE) in batches that grow from 576 to 2,304 rows of 1,024 tokens
2. the rest of 1.72 trillion tokens in batches of 4,608 rows, with theta 10,000 in all layers
3. 250 billion tokens in rows of 8,192 tokens, with theta 160,000 in the global layers and learning rate 3e-4
4. 50 billion tokens in rows of 8,192 tokens, in which the learning rate decays by 1 - sqrt

`tokens` scales all phases, and `batch_size` (a multiple of 8) all batches; see docs/modernbert.md for a run on your own
text. To continue a run on other data, as the authors do in the last two phases, use `--init_from` and
`--keep_optimizer`.

Documents are packed into rows, without attention between them.

Differences from the paper: batches grow in steps, from 576 instead of 768 rows. The matrices that write to the residual
stream have the same initial standard deviation as others. LARGE starts from random parameters instead of BASE's
parameters. There is no dropout of attention outputs. Evaluation masks the same fraction of tokens as training.

Hardware and time: in the paper, 8 H100 for about 8 days (BASE) and 18 days (LARGE).
Expected: 149,655,232 parameters (BASE) and 395,881,664 (LARGE); average GLUE dev score of 88.4 and 90.4.
"""

from ml_collections import ConfigDict

from bertjax.convert.modernbert import MODERNBERT
from bertjax.errors import UsageError
from bertjax.presets import arguments, make_quick, modernbert_config, phase_of

# Number of layers, hidden size and feed-forward size.
_SHAPES = {"base": (22, 768, 1152), "large": (28, 1024, 2624)}
# Learning rate and tokens of the batch ramp. Other sizes use the values of BASE.
_RECIPES = {"base": (8e-4, 50e9), "large": (5e-4, 10e9)}
_TOKENS = 2019e9


@arguments(size="base", corpus="", batch_size=4608, tokens=_TOKENS, quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `size=base,corpus=DIR,batch_size=4608,tokens=2019e9,quick=false`."""
    if args.batch_size <= 0 or args.batch_size % 8:
        raise UsageError(f"batch_size={args.batch_size} is not a positive multiple of 8; use one, such as 64")
    if args.tokens <= 0:
        raise UsageError(f"tokens={args.tokens:g} is not positive; use a number such as 1e9")
    rate, ramp_tokens = _RECIPES.get(args.size, _RECIPES["base"])
    config = modernbert_config(args.size, _SHAPES, MODERNBERT.values, args.quick)
    config.data.update({"corpus": args.corpus, "batch_size": args.batch_size})
    config.optimizer.update({"learning_rate": rate, "weight_decay": 1e-5})
    part = args.tokens / _TOKENS
    # All batch sizes are multiples of the first, so the same number of devices and micro-batches can divide them all.
    first = args.batch_size // 8
    ramp = (first, 2 * first, 4 * first)
    long_rows = {"batch_size": first, "seq_len": 8192, "global_rope_theta": 160_000.0, "learning_rate": 3e-4}
    config.phases = (
        *(phase_of(part * ramp_tokens / len(ramp), rows, 1024) for rows in ramp),
        phase_of(part * (1719e9 - ramp_tokens), args.batch_size, 1024),
        phase_of(part * 250e9, **long_rows),
        phase_of(part * 50e9, **long_rows),
    )
    config.steps = max(1, round(sum(phase["share"] for phase in config.phases)))
    config.optimizer.warmup_steps = round(part * 3e9 / (first * 1024))
    config.optimizer.decay_steps = round(config.phases[-1]["share"])
    if args.quick:
        make_quick(config, 64)
        config.optimizer.decay_steps = 2
    return config
