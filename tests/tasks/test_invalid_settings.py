"""Settings that a task does not support are refused before it reads data."""

import pytest
from helpers.command_runs import EXPERIMENTS, refused

LONG = "data.seq_len=600 model.max_position_embeddings=600"
LEFT = "data.objective=lm model.attention_direction=left"
LSTM, ODD = "model.encoder=lstm", "model.hidden_size=15 model.num_attention_heads=1"


@pytest.mark.parametrize(
    "experiment, fields, message",
    [
        ("squad.py:", "label_smoothing=0.1", "squad predicts positions, not classes"),
        ("squad.py:", "data.examples_per_row=4", "rows of squad are already full"),
        ("swag.py:", "data.class_weights=balanced", "swag has choices, not classes"),
        ("swag.py:", "data.examples_per_row=4", "examples of swag have four sequences each"),
        ("glue.py:task=stsb,", "label_smoothing=0.1", "the labels of stsb are numbers, not classes"),
        ("glue.py:", "data.examples_per_row=3 data.batch_size=32", "it must divide config.data.batch_size=32"),
        ("glue.py:", "data.examples_per_row=4 feature_head.lstm_layers=1", "not supported with LSTMs or a feature"),
        ("glue.py:", "data.examples_per_row=32 data.batch_size=32 grad_accum_steps=2", "batch_size=1 is not divisible"),
        ("glue.py:", "epochs=0 steps=0", "config.epochs=0 is out of range"),
        ("glue.py:", "data.batch_size=0", "data.batch_size is 0"),
        ("glue.py:", "data.seq_len=600", "exceed the 512 tokens of config.model.max_position_embeddings=512"),
        ("glue.py:", f"{LONG} model.attention=fused", "attention=fused does not support rows of 600 tokens"),
        ("text.py:kind=number,", "data.class_weights=balanced", "kind=number has no classes"),
        ("text.py:kind=multilabel,", "label_smoothing=0.1", "kind=multilabel has no classes"),
        ("text.py:kind=multilabel,", "data.label_separator=", "label_separator='' is not valid"),
        ("text.py:dev=a.csv,", "data.dev_share=0.1", "dev_file both define a dev set"),
        ("ner.py:", "data.dev_share=0.1 data.eval_split=none", "dev_share=0.1 has no effect"),
        ("ner.py:", "feature_head.features=last", "needs a frozen encoder; add --config.optimizer.freeze=encoder"),
        ("adapt.py:replay=folder,", "steps=9", "lacks a share; write replay=DIR:SHARE, such as folder:0.2"),
        ("adapt.py:replay=:0.5,", "steps=9", "data.replay_share=0.5 needs a general corpus"),
        ("pretrain.py:", "data.objective=lm", "objective=lm would let the model see the tokens that it predicts; set"),
        ("pretrain.py:objective=rtd,", LSTM, "context from both sides, which model.encoder=lstm does not provide"),
        ("pretrain.py:", f"{LEFT} data.max_predictions=3", "data.max_predictions needs objective=nsp or"),
        ("pretrain.py:", f"{LEFT} data.masking.rate=0.3", "data.masking needs objective=nsp or"),
        ("pretrain.py:", f"{LEFT} {LSTM}", "attention_direction does not apply to encoder=lstm; leave it unset"),
        ("pretrain.py:", f"{LEFT} phases=({{'mask_rate':0.3}},)", "mask_rate in config.phases has no effect"),
        ("pretrain.py:", f"data.objective=lm {LSTM} {ODD}", "hidden_size is 15; encoder=lstm needs an even number"),
        ("pretrain.py:", "model.type_vocab_size=1", "type_vocab_size=1 is too small for sentence pairs"),
        ("pretrain.py:", "data.generator_size=0.5", "data.generator_size needs objective=rtd; objective=nsp"),
        ("pretrain.py:", "phases={'steps':3}", "config.phases[0] is 'steps'; it must be a dictionary"),
        ("pretrain.py:", "phases=({},{'steps':3})", "config.phases[1] contains unknown fields: steps; use one of"),
        ("pretrain.py:", "phases=({'share':0},)", "config.phases[].share is 0.0; it must be above 0"),
        ("pretrain.py:", "phases=({'seq_len':1024},)", "1024 tokens exceed the 512 tokens of config.model"),
        ("pretrain.py:", "phases=({},{'batch_size':7}) grad_accum_steps=2", "batch_size=7 is not divisible by"),
    ],
)
def test_error_names_the_invalid_setting(experiment, fields, message, capfd):
    flags = [f"--config.{field}" for field in fields.split(" ")]
    config = f"--config={EXPERIMENTS}/{experiment}size=L1_H16,quick=true"
    assert message in refused(capfd, "describe", config, *flags)
