"""Fine-tuning on SQuAD 1.1 or 2.0, as in sections 4.2 and 4.3 of the paper.

    bertjax train --config experiments/squad.py:version=1.1,path=squad --init_from runs/base --workdir runs/squad
    bertjax predict --checkpoint runs/squad --split dev --output runs/squad/predictions

`version=triviaqa` is what the paper trains on before SQuAD 1.1: documents of TriviaQA's Wikipedia part with an answer
in their first 400 tokens; `path` is then the folder with qa/wikipedia-train.json and evidence/wikipedia.

`path` is the folder with train-v1.1.json and dev-v1.1.json, or those of 2.0. SQuAD 1.1: batch 32, 5e-5, 3 epochs; 2.0:
batch 48, 5e-5, 2 epochs, and the threshold for no answer that is best on dev. Windows of 384 tokens, one every 128.

Hardware and time: 10,000 training questions, 2 epochs at size 2/256 in rows of 256 and float32, with the evaluation of
all 10,570 dev questions: 24 minutes on two CPU cores that did other work too. BASE on a TPU is not measured.
Expected: dev EM / F1 of BERT BASE on 1.1: 80.8 / 88.5; LARGE 84.1 / 90.9, on 2.0 78.7 / 81.9 (Tables 2 and 3).
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(version="1.1", path="", size="", grid="a3", quick=False)
def get_config(given: ConfigDict) -> ConfigDict:
    """The config for `version=1.1,path=DIR,size=SIZE,grid=a3,quick=false`."""
    config = finetuning_config("squad", given.size)
    second = given.version == "2.0"
    config.epochs = 2 if second else 3
    config.data.path = given.path
    config.data.version = given.version
    config.data.batch_size = 48 if second else 32
    if given.quick:
        make_quick(config, seq_len=64)
        config.data.max_query_len = 16
        config.data.doc_stride = 32
    return config
