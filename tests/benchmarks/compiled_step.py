"""Measures the train step that the TPU compiler produces, for bertjax or Hugging Face's Flax BERT, without a TPU.

    python tests/benchmarks/compiled_step.py --case base
    PYTHONPATH=TRANSFORMERS_4 python tests/benchmarks/compiled_step.py --case base --flax_bert
    python tests/benchmarks/compiled_step.py --case base --override config.model.remat=none --operations 30

Flax BERT needs transformers 4; the tests use version 5, so install it in a separate folder:
`pip install --target TRANSFORMERS_4 'transformers<5'`. As in Hugging Face's example `run_mlm_flax.py`, its step uses
dropout and AdamW, and shards rows over all chips. It also has the next-sentence loss. By default, it gathers the masked
positions before the masked-LM head, as bertjax does. With `--all_positions`, it computes the logits of every token, as
the original `FlaxBertForPreTraining` does.

All figures are per device:

    TFLOP                 FLOPs of matrix products and kernels; every loop iteration counts
    GB                    bytes read from and written to HBM; for kernels, their cost estimate
    GB XLA                "bytes accessed" of XLA's `cost_analysis`, which includes on-chip memory and counts loops once
    GiB of temporaries    peak memory beyond the step's arguments
    GiB XLA               `temp_size_in_bytes` of XLA's `memory_analysis`, which is larger
"""

import collections
import json
import re
import time
from collections.abc import Sequence
from typing import Any

from hlo_cost import instruction_costs
from hlo_program import read_program
from measuring import parser_of

# ModernBERT base, with rows of 1,024 tokens unless overridden.
_MODERNBERT = (
    *("model.vocab_size=50368", "model.intermediate_size=1152", "model.hidden_act=gelu_erf", "model.gated_mlp=true"),
    *("model.norm_first=true", "model.first_attention_norm=false", "model.norm_bias=false", "model.head_bias=false"),
    *("model.attention_bias=false", "model.mlp_bias=false", "model.layer_norm_eps=1e-5", "model.type_vocab_size=0"),
    *("model.position_embedding_type=rotary", "model.max_position_embeddings=8192", "model.local_attention=128"),
    *("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0", "model.scan_layers=true"),
    *("model.remat=full", "data.objective=none", "data.masking.rate=0.3", "data.seq_len=1024"),
)
# Size, topology, rows per batch, mesh.data and other config fields of each case, keyed by name.
CASES = {
    "base": ("base", "v3:4x4", 256, 32, "model.scan_layers=false"),
    "four layers": ("base", "v5e:2x2", 64, 4, "model.scan_layers=false", "model.num_hidden_layers=4"),
    "large 32": ("large", "v5e:4x4", 512, 16, "model.scan_layers=true"),
    "large 64": ("large", "v5e:4x4", 1024, 16, "model.scan_layers=true"),
    "modernbert v5e": ("L22_H768_A12", "v5e:4x4", 256, 16, *_MODERNBERT),
    "modernbert v6e": ("L22_H768_A12", "v6e:4x4", 256, 16, *_MODERNBERT),
}


def case_config(case: str, overrides: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """Returns the config of a case, with `config.FIELD=VALUE` overrides, and its devices."""
    from bertjax.estimate.topology import tpu_devices
    from bertjax.training.checkpoint_config import experiment_config

    size, topology, rows, shards, *fields = CASES[case]
    fields += [f"data.batch_size={rows}", f"mesh.data={shards}"]
    flags = [f"--config.{field}" for field in fields] + [f"--{override}" for override in overrides]
    return experiment_config(f"pretrain:size={size},seq_len=512", flags), tpu_devices(topology, 1)


def lower_bertjax(case: str, overrides: Sequence[str]) -> Any:
    """Lowers the train step of a case."""
    from bertjax.estimate.compiled import lowered_step

    config, devices = case_config(case, overrides)
    return lowered_step(config, 0, devices)[0]


def lower_flax_bert(case: str, all_positions: bool) -> Any:
    """Lowers a train step of Hugging Face's model of the same size, with the same rows per device.

    If `all_positions` is False, the masked-LM head gets the hidden states of as many positions as that of bertjax.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.linen import Module
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from transformers import BertConfig, FlaxBertForPreTraining

    settings, devices = case_config(case)
    model, length, rows = settings.model, settings.data.seq_len, settings.data.batch_size
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = BertConfig(**{name: getattr(model, name) for name in sizes})
    bert = FlaxBertForPreTraining(config, dtype=jnp.bfloat16, _do_init=False)
    params = jax.eval_shape(lambda: bert.init_weights(jax.random.key(0), (1, length)))
    optimizer = optax.adamw(1e-4, weight_decay=0.01)
    opt_state = jax.eval_shape(optimizer.init, params)
    mesh = Mesh(np.array(devices), ("data",))
    replicated, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))

    def logits(module: Module, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ids, mask, segments = (batch[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
        outputs = module.bert(ids, mask, segments, jnp.arange(length)[None], None, deterministic=False)
        hidden, pooled = outputs[0], outputs[1]
        if not all_positions:
            hidden = jnp.take_along_axis(hidden, batch["positions"][..., None], axis=1)
        table = module.bert.variables["params"]["embeddings"]["word_embeddings"]["embedding"]
        return module.cls(hidden, pooled, shared_embedding=table)

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            rngs = {"dropout": key}
            masked_lm, next_sentence = bert.module.apply({"params": params}, batch, rngs=rngs, method=logits)
            masked = batch["labels"] > 0
            mlm = cross_entropy(masked_lm, batch["labels"]) * masked
            nsp = cross_entropy(next_sentence, batch["next_sentence_label"])
            return mlm.sum() / masked.sum() + nsp.mean()

        updates, state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), state

    def with_sharding(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    row = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "labels"), row)
    if not all_positions:
        masked = jax.ShapeDtypeStruct((rows, settings.resolved_phases[0].row_predictions), jnp.int32)
        batch |= {"labels": masked, "positions": masked}
    batch["next_sentence_label"] = jax.ShapeDtypeStruct((rows,), jnp.int32)
    state = with_sharding((params, opt_state), replicated)
    # Flax BERT takes raw uint32 keys.
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=replicated)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*state, with_sharding(batch, by_row), key)


def source_of(operation: str) -> str:
    """Returns the name of an operation without tracing scopes, and with `#` for layer numbers."""
    name = re.sub(r"jit\([^)]*\)/|closed_call/|checkpoint/|rematted_computation/|while/body/", "", operation)
    return re.sub(r"\d+", "#", name)[-90:] or "(no source)"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--case", choices=CASES, default="base", help="model, topology and layout (default: base)")
    parser.add_argument("--flax_bert", action="store_true", help="measures Hugging Face's Flax BERT instead")
    parser.add_argument("--all_positions", action="store_true", help="Flax BERT computes the logits of every token")
    parser.add_argument("--override", nargs="*", default=[], help="config.FIELD=VALUE, overrides of the bertjax config")
    parser.add_argument("--operations", type=int, default=0, help="number of operations to list, by bytes (default: 0)")
    args = parser.parse_args()

    from bertjax.estimate.topology import use_tpu_compiler

    use_tpu_compiler()
    from bertjax.estimate.compiled import peak_bytes

    start = time.monotonic()
    if args.flax_bert:
        lowered = lower_flax_bert(args.case, args.all_positions)
    else:
        lowered = lower_bertjax(args.case, args.override)
    compiled = lowered.compile()
    seconds = time.monotonic() - start
    costs = instruction_costs(read_program(compiled.as_text()))
    memory = compiled.memory_analysis()
    figures = {
        "case": args.case,
        "model": "Flax BERT" if args.flax_bert else "bertjax",
        "all positions": args.all_positions,
        "overrides": args.override,
        "TFLOP": sum(cost.flops for cost in costs) / 1e12,
        "GB": sum(cost.hbm_bytes for cost in costs) / 1e9,
        "GB XLA": compiled.cost_analysis()["bytes accessed"] / 1e9,
        "GiB per chip": peak_bytes(compiled) / 2**30,
        "GiB of temporaries": (peak_bytes(compiled) - memory.argument_size_in_bytes) / 2**30,
        "GiB XLA": memory.temp_size_in_bytes / 2**30,
        "seconds to compile": seconds,
    }
    bytes_moved, times = collections.Counter(), collections.Counter()
    for cost in costs:
        bytes_moved[source_of(cost.source)] += cost.hbm_bytes
        times[source_of(cost.source)] += cost.times
    for name, size in bytes_moved.most_common(args.operations):
        print(f"{size / 1e9:8.2f} GB {100 * size / 1e9 / figures['GB']:5.1f} % {times[name]:6,} x  {name}")
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}))


if __name__ == "__main__":
    main()
