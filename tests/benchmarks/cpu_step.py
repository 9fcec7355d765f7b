"""Where a train step's time goes on the CPU of this machine, and what its matrix products alone would take.

    python tests/benchmarks/cpu_step.py --config pretrain:size=L2_H128,seq_len=64 --override \
      config.data.batch_size=32 config.model.vocab_size=8192 config.model.dtype=float32 \
      config.model.hidden_dropout_prob=0.0 config.model.attention_probs_dropout_prob=0.0
    python tests/benchmarks/cpu_step.py --config pretrain:size=base --override config.data.batch_size=8 \
      config.model.dtype=float32 --steps 4 --operations 20

The first table is of the compiled step's operations by kind, from XLA's own profile of some steps: milliseconds a step,
between an operation's beginning and its end. Some run beside each other, so that they add up to more than a step. The
second is of the step's matrix products, each alone and the best of some: NumPy's with all threads, as the product of
large matrices that MFU on CPUs is held against, and XLA's.
"""

import argparse
import collections
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertjax.cli.main import use_huge_pages


def kind_of(name: str, source: str) -> str:
    """What a line of the table calls an operation."""
    if name.startswith("dot") or (name.startswith("ynn") and "dot_general" in source):
        return "matrix products"
    if "copy" in name:
        return "copies, most of them transposed for a product"
    if re.search(r"dynamic|^while|wrapped_broadcast", name):
        return "the loop over layers: slices, updates, zeros"
    if not source:
        return "of the compiler's own"
    if "/" not in source and "jvp" not in source:
        return "update of parameters"
    for part, kind in (
        ("norm", "LayerNorm"),
        ("attention", "attention without its products"),
        ("embeddings", "embeddings"),
        ("encoder", "feed-forward and residuals"),
    ):
        if re.search(rf"{part}\b", source):
            return kind
    return "heads and losses"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="experiment, as of `bertjax train`")
    parser.add_argument("--override", nargs="*", default=[], help="config.FIELD=VALUE")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--operations", type=int, default=0, help="that take most, to show one by one")
    args = parser.parse_args()
    use_huge_pages()

    import jax

    from bertjax.config.load import load_config
    from bertjax.tasks.build import build_task, parse_config
    from bertjax.training.bench import step_of

    settings = parse_config(load_config(args.config, [f"--{one}" for one in args.override]))
    task = build_task(settings, train=None)
    train_step, state, given = step_of(settings, task)
    step = train_step.lower(state, *given).compile()
    state = jax.block_until_ready(step(state, *given))
    seconds = []
    for _ in range(args.steps):
        began = time.perf_counter()
        state = jax.block_until_ready(step(state, *given))
        seconds.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(args.steps):
                state = jax.block_until_ready(step(state, *given))
        (file,) = Path(folder).rglob("*.xplane.pb")
        spent = operations(jax.profiler.ProfileData.from_file(str(file)))
    kinds, named = collections.Counter(), collections.Counter()
    sources = sources_of(step.as_text())
    for name, nanoseconds in spent.items():
        source, shape = sources.get(name, ("", ""))
        milliseconds = nanoseconds / 1e6 / args.steps
        kinds[kind_of(name, source)] += milliseconds
        named[f"{shape:32s} {source[-80:]:80s} {name}"] += milliseconds
    print(f"a step: {statistics.median(seconds) * 1e3:.1f} ms, at best {min(seconds) * 1e3:.1f}; of these")
    for kind, milliseconds in kinds.most_common():
        print(f"  {milliseconds:8.1f} ms  {kind}")
    for name, milliseconds in named.most_common(args.operations):
        print(f"    {milliseconds:8.2f} ms  {name}")
    rows, masked = settings.data.batch_size, task.synthetic_batch(0)["masked_lm_positions"].size
    alone(products(task.objective.model.config, rows, settings.data.seq_len, masked))


def operations(profile: Any) -> collections.Counter:
    """Nanoseconds of each operation of the step; a loop is its own overhead, as what is in it is there by itself."""
    spent: collections.Counter = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name:
                    spent[name] += event.duration_ns
    return spent


def sources_of(program: str) -> dict[str, tuple[str, str]]:
    """Operation to where it comes from, and its shape."""
    found = {}
    for line in program.splitlines():
        if match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\S+)", line):
            source = re.search(r'op_name="([^"]*)"', line)
            text = re.sub(r"jit\([^)]*\)/|closed_call/|checkpoint/|while/body/", "", source[1] if source else "")
            found[match[1]] = (text, match[2].partition("{")[0])
    return found


def products(model: Any, rows: int, length: int, masked: int) -> list[tuple[str, int, Any, Any]]:
    """Name, times a step and both factors of each product of a step, forwards and backwards."""
    import numpy as np

    random = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32)

    tokens, width, layers = rows * length, model.hidden_size, model.num_hidden_layers
    found = []
    for name, times, many, inner, outer in (
        ("query, key, value, output", 4 * layers, tokens, width, width),
        ("into feed-forward", layers, tokens, width, model.intermediate_size),
        ("out of feed-forward", layers, tokens, model.intermediate_size, width),
        ("vocabulary", 1, masked, width, model.padded_vocab_size),
    ):
        x, kernel, back = array(many, inner), array(inner, outer), array(many, outer)
        # The vocabulary's table lies the other way, and so does its gradient.
        tied = name == "vocabulary"
        kernel = array(outer, inner).T if tied else kernel
        found += [(name, times, x, kernel), (f"{name}, input's gradient", times, back, kernel.T)]
        found += [(f"{name}, kernel's gradient", times, *((back.T, x) if tied else (x.T, back)))]
    heads = rows * model.num_attention_heads
    scores, context = array(heads, length, length), array(heads, length, model.head_size)
    found += [("scores and what is like them", 3 * layers, context, context.swapaxes(1, 2))]
    return [*found, ("context and what is like it", 3 * layers, scores, context)]


def alone(made: list[tuple[str, int, Any, Any]], rounds: int = 25) -> None:
    """Times each product alone, NumPy's and XLA's in turns."""
    import numpy as np

    large = np.ones((2048, 2048), np.float32)
    made = [("2048 x 2048 x 2048", 0, large, large), *made]
    callers = [(lambda x=x, y=y: np.matmul(x, y), by_xla(x, y)) for _, _, x, y in made]
    best = [[float("inf")] * 2 for _ in made]
    for _ in range(rounds):
        for index, pair in enumerate(callers):
            for of, call in enumerate(pair):
                began = time.perf_counter()
                call()
                best[index][of] = min(best[index][of], time.perf_counter() - began)
    work = [2 * x.size * y.shape[-1] for _, _, x, y in made]
    peak = work[0] / best[0][0]
    print("products alone, NumPy's and XLA's")
    for (name, times, _, _), seconds, flop in zip(made, best, work, strict=True):
        shown = "".join(f"{one * 1e3:9.3f} ms {flop / one / 1e9:6.1f} GFLOP/s" for one in seconds)
        print(f"  {times:4d} x {shown}  {name}")
    totals = [sum(one[1] * pair[of] for one, pair in zip(made, best, strict=True)) * 1e3 for of in (0, 1)]
    least = sum(one[1] * flop for one, flop in zip(made, work, strict=True)) / peak * 1e3
    print(f"  {totals[0]:.1f} and {totals[1]:.1f} ms in all; {least:.1f} at NumPy's rate of 2048 x 2048 x 2048")


def by_xla(x: Any, y: Any) -> Callable[[], Any]:
    """The product of arrays that lie as these do, compiled."""
    import jax

    turned = [one.ndim == 2 and not one.flags.c_contiguous for one in (x, y)]
    x, y = (jax.numpy.asarray(one.T if turn else one) for one, turn in zip((x, y), turned, strict=True))

    @jax.jit
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x.T if turned[0] else x) @ (y.T if turned[1] else y)

    product(x, y)
    return lambda: jax.block_until_ready(product(x, y))


if __name__ == "__main__":
    main()
