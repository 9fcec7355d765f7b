"""Fine-tuning on the named entities of CoNLL-2003, as in section 5.3 of the paper.

    bertjax train --config experiments/ner.py:path=conll2003 --init_from runs/base_cased --workdir runs/ner
    bertjax predict --checkpoint runs/ner --output runs/ner/predictions

`path` is the folder with eng.train, eng.testa and eng.testb. A cased checkpoint; rows are as much of a document as fits
in 512 tokens (`context=sentence` for sentences); the first piece of a word carries its tag.

Hardware and time: to be measured with a pre-trained checkpoint; the table in the README has what was.
Expected: F1 of BERT BASE 96.4 on dev and 92.4 on test, LARGE 96.6 and 92.8, means of 5 restarts (Table 7).
"""

from ml_collections import ConfigDict

from bertjax.config import parse_arguments
from bertjax.fields import finetuning_config, make_quick


def get_config(arguments: str | None = None) -> ConfigDict:
    """The config for `path=DIR,context=document,size=SIZE,quick=false`."""
    given = parse_arguments(arguments, path="", context="document", size="", quick=False)
    config = finetuning_config("ner", given.size)
    config.data.path = given.path
    config.data.context = given.context
    config.data.train_file = "eng.train"
    config.data.dev_file = "eng.testa"
    config.data.test_file = "eng.testb"
    config.data.seq_len = 512 if given.context == "document" else 128
    config.data.batch_size = 16
    if given.quick:
        make_quick(config, seq_len=64)
    return config
