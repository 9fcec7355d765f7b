"""Migration from `FlaxBertModel`, which transformers removed in version 5.

The comments show the old code above each replacement.

    python examples/from_flax_bert.py CHECKPOINT

CHECKPOINT is a Hugging Face folder with safetensors weights, for example from `save_pretrained`.
"""

import sys

import jax
import numpy as np

import bertjax


def main(checkpoint: str) -> np.ndarray:
    # tokenizer = BertTokenizerFast.from_pretrained(checkpoint)
    # model = FlaxBertModel.from_pretrained(checkpoint)
    bert = bertjax.load(checkpoint)

    # inputs = tokenizer(["a film", "a book"], padding=True, return_tensors="np")
    batch = bert.batch(["a film", "a book"])
    # inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"]
    arrays = batch["input_ids"], batch["input_mask"], batch["segment_ids"]

    # outputs = model(**inputs)
    # outputs.last_hidden_state, outputs.pooler_output
    encoded = bert.encode(["a film", "a book"])
    states, pooled = encoded.last_hidden_state, encoded.pooled

    # outputs = model(**inputs, output_hidden_states=True); outputs.hidden_states
    input_ids, mask, segment_ids = arrays
    last, layers = bertjax.Encoder(bert.config).apply(
        {"params": bert.params["encoder"]}, input_ids, segment_ids, mask, collect_layers=True
    )  # [B, L, D] and [N + 1, B, L, D]

    # outputs = model(**inputs, params=params, train=True, dropout_rng=key)
    dropped, _ = bertjax.Encoder(bert.config).apply(
        {"params": bert.params["encoder"]},
        *(input_ids, segment_ids, mask),
        deterministic=False,
        rngs={"dropout": jax.random.key(0)},
    )

    # model.config.hidden_size; model.params; tokenizer.convert_ids_to_tokens(ids)
    print(bert.architecture.hidden_size, sorted(bert.params), bert.tokenizer.pieces(input_ids[0]))
    print(states.shape, pooled.shape, layers.shape, dropped.shape)
    # model.save_pretrained(folder); run `bertjax convert WORKDIR FOLDER --format huggingface` instead
    return np.asarray(last)


if __name__ == "__main__":
    main(sys.argv[1])
