"""Fine-tuning on named-entity recognition, CoNLL-2003 (section 5.3 of the paper).

    bertjax train --config experiments/ner.py:path=conll2003 --init_from runs/base_cased --workdir runs/ner
    bertjax predict --checkpoint runs/ner --output runs/ner/predictions

`path` is the folder with eng.train, eng.testa and eng.testb. Use a cased checkpoint. A row contains as much of a
document as fits into 512 tokens, or one sentence with `context=sentence`. The model predicts the tag of a word at its
first piece.

Hardware and time: two CPU cores that also ran other work. With size L2_H256, rows of 256 tokens and float32, 3
epochs took 4 minutes. BASE on a TPU has not been measured.
Expected: BERT BASE reaches F1 96.4 on dev and 92.4 on test, LARGE 96.6 and 92.8 (Table 7, means of 5 seeds).
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(path="", context="document", size="", grid="a3", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `path=DIR,context=document,size=SIZE,grid=a3,quick=false`."""
    config = finetuning_config("ner", args.size)
    config.data.update({"path": args.path, "context": args.context})
    config.data.seq_len = 512 if args.context == "document" else 128
    config.data.batch_size = 16
    if args.quick:
        make_quick(config, seq_len=64)
    return config
