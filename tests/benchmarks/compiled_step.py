"""What the TPU compiler makes of one train step, ours or that of Hugging Face's Flax BERT: no TPU is needed.

    python tests/benchmarks/compiled_step.py --case base
    PYTHONPATH=TRANSFORMERS_4 python tests/benchmarks/compiled_step.py --case base --theirs
    python tests/benchmarks/compiled_step.py --case base --override config.model.remat=none --operations 30

Theirs needs transformers 4, the last to have it; the tests have version 5, so it has a folder of
its own: `pip install --target TRANSFORMERS_4 'transformers<5'`. Their step is as in their example `run_mlm_flax.py`,
with their next-sentence loss: mean cross-entropies over all positions, AdamW, dropout on, rows cut over all chips.

FLOPs, bytes and temporaries are of one device; loops are counted as often as they run. `bytes` are those that main
memory reads and writes; `bytes XLA` is what XLA's `cost_analysis` says, which counts what stays in near memory too, and
loops once. `GiB of temporaries` are there at one time; `GiB XLA` is its `temp_size_in_bytes`, which counts more. A
kernel's are those of its cost estimate.
"""

import argparse
import collections
import json
import re
import time
from typing import Any

from hlo_cost import instruction_costs
from hlo_program import read_program

# Name to experiment, topology and fields. All tokens of all rows are real.
CASES = {
    "base": (
        "pretrain:size=base,seq_len=512",
        "v3:4x4",
        ("data.batch_size=256", "mesh.data=32", "model.scan_layers=false"),
    ),
    "base scanned": ("pretrain:size=base,seq_len=512", "v3:4x4", ("data.batch_size=256", "mesh.data=32")),
    "four layers": (
        "pretrain:size=base,seq_len=512",
        "v5e:2x2",
        ("model.num_hidden_layers=4", "data.batch_size=64", "mesh.data=4", "model.scan_layers=false"),
    ),
    "four layers 128": (
        "pretrain:size=base,seq_len=128",
        "v5e:2x2",
        ("model.num_hidden_layers=4", "data.batch_size=256", "mesh.data=4", "model.scan_layers=false"),
    ),
    "large 32": ("pretrain:size=large,seq_len=512", "v5e:4x4", ("data.batch_size=512", "mesh.data=16")),
    "large 64": ("pretrain:size=large,seq_len=512", "v5e:4x4", ("data.batch_size=1024", "mesh.data=16")),
}


def ours(case: str, overrides: list[str]) -> Any:
    """The lowered step of a case."""
    from bertjax.config.load import load_config
    from bertjax.estimate.compiled import lowered_step
    from bertjax.estimate.topology import tpu_devices
    from bertjax.tasks.build import parse_config

    experiment, topology, fields = CASES[case]
    given = [f"--config.{field}" for field in fields] + [f"--{override}" for override in overrides]
    return lowered_step(parse_config(load_config(experiment, given)), 0, tpu_devices(topology, 1))[0]


def theirs(case: str) -> Any:
    """The lowered step of Hugging Face's model of the same sizes, on as many rows a device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from transformers import BertConfig, FlaxBertForPreTraining

    from bertjax.config.load import load_config
    from bertjax.estimate.topology import tpu_devices
    from bertjax.tasks.build import parse_config

    experiment, topology, fields = CASES[case]
    settings = parse_config(load_config(experiment, [f"--config.{field}" for field in fields]))
    model, length, rows = settings.model, settings.data.seq_len, settings.data.batch_size
    config = BertConfig(
        hidden_size=model["hidden_size"],
        num_hidden_layers=model["num_hidden_layers"],
        num_attention_heads=model["num_attention_heads"],
        intermediate_size=model["intermediate_size"],
    )
    bert = FlaxBertForPreTraining(config, dtype=jnp.bfloat16, _do_init=False)
    params = jax.eval_shape(lambda: bert.init_weights(jax.random.key(0), (1, length)))
    optimizer = optax.adamw(1e-4, weight_decay=0.01)
    opt_state = jax.eval_shape(optimizer.init, params)
    mesh = Mesh(np.array(tpu_devices(topology, 1)), ("data",))
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
            out = bert(**inputs, params=params, dropout_rng=key, train=True)
            masked = batch["labels"] > 0
            mlm = cross_entropy(out.prediction_logits, batch["labels"]) * masked
            nsp = cross_entropy(out.seq_relationship_logits, batch["next_sentence_label"])
            return mlm.sum() / masked.sum() + nsp.mean()

        updates, state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), state

    def placed(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    row = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "labels"), row)
    batch["next_sentence_label"] = jax.ShapeDtypeStruct((rows,), jnp.int32)
    state = placed((params, opt_state), whole)
    # A key of raw words, as theirs are.
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*state, placed(batch, cut), key)


def source_of(operation: str) -> str:
    """The name of an operation, without what tells one layer from another, or how it was traced."""
    name = re.sub(r"jit\([^)]*\)/|closed_call/|checkpoint/|rematted_computation/|while/body/", "", operation)
    return re.sub(r"\d+", "#", name)[-90:] or "(of the compiler's)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="base")
    parser.add_argument("--theirs", action="store_true", help="Hugging Face's Flax BERT in the place of ours")
    parser.add_argument("--override", nargs="*", default=[], help="config.FIELD=VALUE, of ours")
    parser.add_argument("--operations", type=int, default=0, help="that move most bytes, to show")
    args = parser.parse_args()

    from bertjax.estimate.topology import use_tpu_compiler

    use_tpu_compiler()
    from bertjax.estimate.compiled import peak_bytes

    began = time.monotonic()
    lowered = theirs(args.case) if args.theirs else ours(args.case, args.override)
    compiled = lowered.compile()
    seconds = time.monotonic() - began
    costs = instruction_costs(read_program(compiled.as_text()))
    memory = compiled.memory_analysis()
    found = {
        "case": args.case,
        "of": "Hugging Face" if args.theirs else "bertjax",
        "overrides": args.override,
        "TFLOP": sum(cost.flops for cost in costs) / 1e12,
        "GB": sum(cost.hbm_bytes for cost in costs) / 1e9,
        "GB XLA": compiled.cost_analysis()["bytes accessed"] / 1e9,
        "GiB of temporaries": (peak_bytes(compiled) - memory.argument_size_in_bytes) / 2**30,
        "GiB XLA": memory.temp_size_in_bytes / 2**30,
        "seconds to compile": seconds,
    }
    moved, times = collections.Counter(), collections.Counter()
    for cost in costs:
        moved[source_of(cost.source)] += cost.hbm_bytes
        times[source_of(cost.source)] += cost.times
    for name, size in moved.most_common(args.operations):
        print(f"{size / 1e9:8.2f} GB {100 * size / 1e9 / found['GB']:5.1f} % {times[name]:6,} x  {name}")
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
