"""Training of a text embedder on pairs, triplets or scored pairs of texts.

    bertjax train --config experiments/embed.py:train=pairs.tsv,dev=sts.tsv --init_from CKPT --workdir runs/embed
    bertjax evaluate --checkpoint CKPT --config experiments/embed.py:dev=sts.tsv

Files are .tsv (quotes are not special), .csv or .jsonl, or `hf:ORG/NAME:SPLIT`; several training files are separated by
`+`. `columns=` names the columns of the anchor, its positive and hard negatives (default: `anchor+positive`).
`scored=` names the columns of two texts and a score or class (default: `sentence1+sentence2+score`).

Losses: `info_nce` (default), `gist`, `cosent`, `cosine`, `softmax`, `margin_mse`, `distill_vectors`.

Hardware and time: depends on the data; `bertjax bench step` with the same config prints the tokens/s of this machine.
Expected: depends on the data; the final table shows the metrics before and after training, and those of a baseline
without a model: BM25, or the fraction of words that two texts share.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(
    train="",
    dev="",
    test="",
    retrieval="",
    columns="",
    scored="",
    loss="info_nce",
    chunk=0,
    size="",
    grid="a3",
    quick=False,
)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `train=FILE+FILE,dev=FILE,test=FILE,retrieval=DIR,columns=A+B,scored=A+B+C,loss=info_nce`.

    `chunk=0` encodes whole batches at once. `size=SIZE,grid=a3,quick=false` are the same as in other experiments.
    """
    config = finetuning_config("embed", args.size)
    files = [file for file in args.train.split("+") if file]
    if len(files) > 1:
        config.data.sources = tuple({"file": file} for file in files)
    else:
        config.data.train_file = args.train
    config.data.update({"dev_file": args.dev, "test_file": args.test, "retrieval": args.retrieval})
    for field, names in (("columns", args.columns), ("scored_columns", args.scored)):
        if names:
            config.data[field] = tuple(names.split("+"))
    config.embed.update({"loss": args.loss, "chunk": args.chunk})
    if args.quick:
        make_quick(config, seq_len=32)
    return config
