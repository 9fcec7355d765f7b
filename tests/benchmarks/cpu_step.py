"""Profiles a train step on the CPU of this machine, and times its matrix products separately.

    python tests/benchmarks/cpu_step.py --config pretrain:size=L2_H128,seq_len=64 --override \
      config.data.batch_size=32 config.model.vocab_size=8192 \
      config.model.hidden_dropout_prob=0.0 config.model.attention_probs_dropout_prob=0.0
    python tests/benchmarks/cpu_step.py --config pretrain:size=base --override config.data.batch_size=8 \
      --steps 4 --operations 20

The first table shows the time of each kind of operation, in milliseconds per step from XLA's profile. Operations may
run in parallel, so the sum can exceed the step time. The second table shows the time of each matrix product alone, in
NumPy (the reference for MFU on CPU) and in XLA: the best of 25 rounds, with all threads.
"""

import argparse
import collections
import operator
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bertjax.utils.devices import use_huge_pages


def kind_of(name: str, source: str) -> str:
    """Returns the line of the first table to which an operation belongs."""
    if name.startswith("dot") or (name.startswith("ynn") and "dot_general" in source):
        return "matrix products"
    if "copy" in name:
        return "copies, mostly transposes for a product"
    if re.search(r"dynamic|^while|wrapped_broadcast", name):
        return "loop over layers: slices, updates, zeros"
    if not source:
        return "compiler-generated"
    if "/" not in source and "jvp" not in source:
        return "parameter update"
    for part, kind in (
        ("norm", "LayerNorm"),
        ("attention", "attention without its products"),
        ("embeddings", "embeddings"),
        ("encoder", "feed-forward and residuals"),
    ):
        if re.search(rf"{part}\b", source):
            return kind
    return "heads and losses"


class Product(NamedTuple):
    """A matrix product of the step: its name, its count per step and its operands."""

    name: str
    count: int
    left: Any
    right: Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="experiment, as for `bertjax train`")
    parser.add_argument("--override", nargs="*", default=[], help="config.FIELD=VALUE")
    parser.add_argument("--steps", type=int, default=10, help="profiled steps (default: 10)")
    parser.add_argument("--operations", type=int, default=0, help="lists this many operations by time (default: 0)")
    args = parser.parse_args()
    use_huge_pages()

    import jax

    from bertjax.tasks.build import build_task
    from bertjax.training.bench import make_bench_step
    from bertjax.training.checkpoint_config import experiment_config

    config = experiment_config(args.config, [f"--{override}" for override in args.override])
    task = build_task(config, train=None)
    train_step, state, inputs = make_bench_step(task)
    step = train_step.lower(state, *inputs).compile()
    state = jax.block_until_ready(step(state, *inputs))
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state, *inputs))
        seconds.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(args.steps):
                state = jax.block_until_ready(step(state, *inputs))
        (file,) = Path(folder).rglob("*.xplane.pb")
        nanoseconds = operation_nanoseconds(jax.profiler.ProfileData.from_file(str(file)))
    by_kind, by_operation = collections.Counter(), collections.Counter()
    sources = operation_sources(step.as_text())
    for name, duration in nanoseconds.items():
        source, shape = sources.get(name, ("", ""))
        milliseconds = duration / 1e6 / args.steps
        by_kind[kind_of(name, source)] += milliseconds
        by_operation[f"{shape:32s} {source[-80:]:80s} {name}"] += milliseconds
    print(f"step: median {statistics.median(seconds) * 1e3:.1f} ms, minimum {min(seconds) * 1e3:.1f} ms")
    for kind, milliseconds in by_kind.most_common():
        print(f"  {milliseconds:8.1f} ms  {kind}")
    for name, milliseconds in by_operation.most_common(args.operations):
        print(f"    {milliseconds:8.2f} ms  {name}")
    rows, num_masked = config.data.batch_size, task.benchmark_batch(0)["masked_lm_positions"].size
    time_products(make_products(task.objective.model.config, rows, config.data.seq_len, num_masked))


def operation_nanoseconds(profile: Any) -> collections.Counter:
    """Returns nanoseconds per operation; a loop counts without its body, whose operations are listed separately."""
    nanoseconds: collections.Counter = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name:
                    nanoseconds[name] += event.duration_ns
    return nanoseconds


def operation_sources(program: str) -> dict[str, tuple[str, str]]:
    """Returns the source and the shape of each operation."""
    sources = {}
    for line in program.splitlines():
        if match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\S+)", line):
            source = re.search(r'op_name="([^"]*)"', line)
            text = re.sub(r"jit\([^)]*\)/|closed_call/|checkpoint/|while/body/", "", source[1] if source else "")
            sources[match[1]] = (text, match[2].partition("{")[0])
    return sources


def make_products(model: Any, rows: int, length: int, num_masked: int) -> list[Product]:
    """Returns the matrix products of a step, in the forward pass and the backward pass."""
    import numpy as np

    random = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32)

    num_tokens, width, layers = rows * length, model.hidden_size, model.num_hidden_layers
    products = []
    for name, count, num_rows, num_inputs, num_outputs in (
        ("query, key, value, output", 4 * layers, num_tokens, width, width),
        ("feed-forward in", layers, num_tokens, width, model.intermediate_size),
        ("feed-forward out", layers, num_tokens, model.intermediate_size, width),
        ("vocabulary", 1, num_masked, width, model.padded_vocab_size),
    ):
        x, kernel, gradient = array(num_rows, num_inputs), array(num_inputs, num_outputs), array(num_rows, num_outputs)
        # The output layer uses the transposed token embeddings, so its gradient is transposed too.
        is_tied = name == "vocabulary"
        kernel = array(num_outputs, num_inputs).T if is_tied else kernel
        products += [
            Product(name, count, x, kernel),
            Product(f"{name}, gradient of input", count, gradient, kernel.T),
            Product(f"{name}, gradient of kernel", count, *((gradient.T, x) if is_tied else (x.T, gradient))),
        ]
    heads = rows * model.num_attention_heads
    scores, context = array(heads, length, length), array(heads, length, model.head_size)
    return [
        *products,
        Product("attention scores and gradients of that shape", 3 * layers, context, context.swapaxes(1, 2)),
        Product("attention context and gradients of that shape", 3 * layers, scores, context),
    ]


def time_products(products: list[Product], rounds: int = 25) -> None:
    """Times each product alone and prints the second table."""
    import numpy as np

    large = np.ones((2048, 2048), np.float32)
    products = [Product("2048 x 2048 x 2048", 0, large, large), *products]
    calls = [
        (lambda x=product.left, y=product.right: np.matmul(x, y), compile_product(product.left, product.right))
        for product in products
    ]
    best = [[float("inf"), float("inf")] for _ in products]
    for _ in range(rounds):
        for seconds, libraries in zip(best, calls, strict=True):
            for i, call in enumerate(libraries):
                start = time.perf_counter()
                call()
                seconds[i] = min(seconds[i], time.perf_counter() - start)
    flops = [2 * product.left.size * product.right.shape[-1] for product in products]
    peak = flops[0] / best[0][0]
    print("products alone: count, NumPy, XLA")
    for product, seconds, flop in zip(products, best, flops, strict=True):
        columns = "".join(f"{each * 1e3:9.3f} ms {flop / each / 1e9:6.1f} GFLOP/s" for each in seconds)
        print(f"  {product.count:4d} x {columns}  {product.name}")
    counts = [product.count for product in products]
    numpy_ms, xla_ms = (1e3 * sum(map(operator.mul, counts, column)) for column in zip(*best, strict=True))
    peak_ms = 1e3 * sum(map(operator.mul, counts, flops)) / peak
    print(
        f"  per step: NumPy {numpy_ms:.1f} ms, XLA {xla_ms:.1f} ms, at NumPy's rate of the first line {peak_ms:.1f} ms"
    )


def compile_product(x: Any, y: Any) -> Callable[[], Any]:
    """Returns a function that multiplies two arrays in XLA, with the memory layout of the NumPy arrays."""
    import jax

    transposed = [array.ndim == 2 and not array.flags.c_contiguous for array in (x, y)]
    x, y = (jax.numpy.asarray(array.T if is_t else array) for array, is_t in zip((x, y), transposed, strict=True))

    @jax.jit
    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x.T if transposed[0] else x) @ (y.T if transposed[1] else y)

    multiply(x, y)
    return lambda: jax.block_until_ready(multiply(x, y))


if __name__ == "__main__":
    main()
