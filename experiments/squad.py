"""Fine-tuning on SQuAD 1.1 or 2.0 (sections 4.2 and 4.3 of the paper).

    bertjax train --config experiments/squad.py:version=1.1,path=squad --init_from runs/base --workdir runs/squad
    bertjax predict --checkpoint runs/squad --split dev --output runs/squad/predictions

Versions:
- 1.1: batch size 32, learning rate 5e-5, 3 epochs. `path` contains train-v1.1.json and dev-v1.1.json.
- 2.0: batch size 48, learning rate 5e-5, 2 epochs, no-answer threshold with the best F1 on dev. `path` contains
  train-v2.0.json and dev-v2.0.json.
- triviaqa: TriviaQA, on which the paper trains before SQuAD 1.1. The experiment uses the Wikipedia documents
  that have an answer in their first 400 words. `path` contains qa/wikipedia-train.json and evidence/wikipedia.

Passages are split into windows of 384 tokens with a stride of 128.

Hardware and time: two CPU cores that also ran other work. With size L2_H256, rows of 256 tokens and float32, 2
epochs of 10,000 training questions and the evaluation of all 10,570 dev questions took 24 minutes. BASE on a TPU has
not been measured.
Expected: EM / F1 on the dev set of 1.1 are 80.8 / 88.5 with BERT BASE and 84.1 / 90.9 with LARGE (Table 2). On the dev
set of 2.0, they are 78.7 / 81.9 with LARGE (Table 3).
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(version="1.1", path="", size="", grid="a3", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `version=1.1,path=DIR,size=SIZE,grid=a3,quick=false`."""
    config = finetuning_config("squad", args.size)
    is_v2 = args.version == "2.0"
    config.epochs = 2 if is_v2 else 3
    config.data.update({"path": args.path, "version": args.version})
    config.data.batch_size = 48 if is_v2 else 32
    if args.quick:
        make_quick(config, seq_len=64)
        config.data.update({"max_query_len": 16, "doc_stride": 32})
    return config
