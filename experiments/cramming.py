"""Pre-training of a BERT in a day on one GPU (Cramming, arXiv 2212.14034, as in the final version of its code).

    bertjax prepare --input text:'texts/*.txt' --vocab_size 32768 --uncased --output corpus
    bertjax describe --config experiments/cramming.py --config.model.vocab_size=32768
    bertjax plan --config experiments/cramming.py --config.grad_accum_steps=128 --topology v5e:1x1
    bertjax train --config experiments/cramming.py:corpus=corpus --workdir runs/crammed

The model has 16 pre-norm layers with GeGLU, and no biases. It trains with masked LM on rows of 128 tokens, with 25 %
masks and without dropout. In the first 60 % of the tokens, batches grow to 8,192 rows. The learning rate rises for half
of the tokens, then falls.

Differences from the paper: positions are learned instead of scaled sinusoids, and the data is not sorted or filtered.
The budget is a number of steps instead of a day: time a step with `bertjax bench step`, and set `--config.steps`.

Hardware and time: in the paper, one day on an RTX A6000.
Expected: 119,688,192 parameters (120 million in the paper), and an average GLUE dev score of 78.6.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, make_quick, phase_of, pretraining_config

_RAMP = (512, 1024, 2048, 4096)


@arguments(size="L16_H768", corpus="", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `size=L16_H768,corpus=DIR,quick=false`."""
    config = pretraining_config("L4_H128" if args.quick else args.size)
    config.model.update(
        {
            "intermediate_size": 2 * config.model.hidden_size,
            "max_position_embeddings": 128,
            "type_vocab_size": 0,
            "hidden_act": "gelu_erf",
            "norm_first": True,
            "gated_mlp": True,
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head": "linear",
            "decoder_bias": False,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
    )
    config.data.update({"corpus": args.corpus, "objective": "none", "seq_len": 128, "batch_size": 8192})
    config.data.masking.rate = 0.25
    config.optimizer.update({"name": "adamw", "learning_rate": 1e-3, "schedule": "cosine"})
    config.optimizer.update({"b2": 0.98, "eps": 1e-12, "clip_norm": 0.5})
    # Each batch size of the ramp processes the same number of tokens.
    config.phases = (*(phase_of(0.6 / len(_RAMP), rows, 128) for rows in _RAMP), phase_of(0.4, 8192, 128))
    config.steps = 12_000
    # Warm-up takes half of the tokens: the first three batch sizes of the ramp, and a third of the fourth.
    steps = [phase["share"] for phase in config.phases]
    config.optimizer.warmup_steps = round(config.steps * (sum(steps[:3]) + steps[3] / 3) / sum(steps))
    if args.quick:
        make_quick(config, 8)
    return config
