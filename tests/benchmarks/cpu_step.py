"""Where a train step's time goes on the CPU of this machine, and what its matrix products alone would take.

    python tests/benchmarks/cpu_step.py --config pretrain:size=L2_H128,seq_len=64 --override \
      config.data.batch_size=32 config.model.vocab_size=8192 config.model.dtype=float32 \
      config.model.hidden_dropout=0.0 config.model.attention_dropout=0.0
    python tests/benchmarks/cpu_step.py --config pretrain:size=base --override config.data.batch_size=8 \
      config.model.dtype=float32 --operations 20

The first table is of the compiled step's operations by kind, from XLA's own profile of some steps: milliseconds a step,
between an operation's beginning and its end. Some run beside each other, so that they add up to more than a step. The
second is of NumPy's float32 products of the same shapes, each alone and the best of some: with all threads, as the
`sgemm` of large matrices that MFU on CPUs is held against.
"""

import argparse
import collections
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def kind_of(name: str, source: str) -> str:
    """What a line of the table calls an operation."""
    if re.match(r"dot|convolution", name) or (name.startswith("ynn") and "dot_general" in source):
        return "matrix products"
    if "copy" in name:
        return "copies, most of them transposed for a product"
    if re.search(r"dynamic|^while|wrapped_broadcast", name):
        return "the loop over layers: slices, updates, zeros"
    if "/" not in source and "jvp" not in source:
        return "update of parameters"
    for part in ("dropout", "attention_norm", "mlp_norm", "norm", "attention", "masked_lm", "embeddings"):
        if f"/{part}" in source:
            return {"attention_norm": "LayerNorm", "mlp_norm": "LayerNorm", "norm": "LayerNorm"}.get(part, part)
    return "feed-forward and residuals" if "layers" in source else "loss"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="experiment, as of `bertjax train`")
    parser.add_argument("--override", nargs="*", default=[], help="config.FIELD=VALUE")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--operations", type=int, default=0, help="that take most, to show one by one")
    args = parser.parse_args()
    if "GLIBC_TUNABLES" not in os.environ:
        # As every command of bertjax has it.
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    import jax

    from bertjax.building import settings_of
    from bertjax.config import load_config
    from bertjax.tasks.run import build_task
    from bertjax.training.optimizer import LearningRate, make_optimizer
    from bertjax.training.sharding import make_mesh, put_batch, replicated
    from bertjax.training.step import init_state, make_train_step

    settings = settings_of(load_config(args.config, [f"--{one}" for one in args.override]))
    task = build_task(settings, train=None)
    mesh, optimizer = make_mesh(settings.mesh), make_optimizer(settings.optimizer)
    state = init_state(task.objective, optimizer, mesh, jax.random.key(0))
    given = (
        put_batch(task.synthetic_batch(0), mesh),
        jax.device_put(jax.random.key(1), replicated(mesh)),
        LearningRate(1e-4, 10, 100),
    )
    step = make_train_step(task.objective, optimizer, mesh, 1).lower(state, *given).compile()
    state = jax.block_until_ready(step(state, *given))

    def run(state: Any, seconds: list[float]) -> Any:
        for _ in range(args.steps):
            began = time.perf_counter()
            state = jax.block_until_ready(step(state, *given))
            seconds.append(time.perf_counter() - began)
        return state

    seconds: list[float] = []
    state = run(state, seconds)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(state, [])
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
    model, rows = settings.model, settings.data.batch_size
    alone(products(model, rows, settings.data.seq_len, task.synthetic_batch(0)["masked_lm_positions"].size))


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


def products(model: dict[str, Any], rows: int, length: int, masked: int) -> list[tuple[str, int, Any, Any]]:
    """Name, times a step and both factors of each product of a step, forwards and backwards."""
    import numpy as np

    random = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32)

    tokens, width, layers = rows * length, model["hidden_size"], model["num_layers"]
    vocabulary = -(-model["vocab_size"] // model["vocab_multiple"]) * model["vocab_multiple"]
    found = []
    for name, times, many, inner, outer in (
        ("query, key, value, output", 4 * layers, tokens, width, width),
        ("into feed-forward", layers, tokens, width, model["mlp_size"]),
        ("out of feed-forward", layers, tokens, model["mlp_size"], width),
        ("vocabulary", 1, masked, width, vocabulary),
    ):
        x, kernel, back = array(many, inner), array(inner, outer), array(many, outer)
        kernel = array(outer, inner).T if name == "vocabulary" else kernel
        found += [(name, times, x, kernel), (f"{name}, input's gradient", times, back, kernel.T)]
        found += [(f"{name}, kernel's gradient", times, *((back.T, x) if name == "vocabulary" else (x.T, back)))]
    head = width // model["num_heads"]
    heads = rows * model["num_heads"]
    scores, context = array(heads, length, length), array(heads, length, head)
    found += [("scores and what is like them", 3 * layers, context, context.swapaxes(1, 2))]
    return [*found, ("context and what is like it", 3 * layers, scores, context)]


def alone(made: list[tuple[str, int, Any, Any]], rounds: int = 25) -> None:
    """Times NumPy's products in turns."""
    import numpy as np

    large = np.ones((2048, 2048), np.float32)
    made = [("2048 x 2048 x 2048", 0, large, large), *made]
    best = [float("inf")] * len(made)
    for _ in range(rounds):
        for index, (_, _, x, y) in enumerate(made):
            began = time.perf_counter()
            np.matmul(x, y)
            best[index] = min(best[index], time.perf_counter() - began)
    work = [2 * x.size * y.shape[-1] for _, _, x, y in made]
    peak = work[0] / best[0]
    print("NumPy's products alone")
    for (name, times, _, _), seconds, flop in zip(made, best, work, strict=True):
        print(f"  {times:4d} x {seconds * 1e3:8.3f} ms  {flop / seconds / 1e9:6.1f} GFLOP/s  {name}")
    total = sum(one[1] * seconds for one, seconds in zip(made, best, strict=True))
    least = sum(one[1] * flop for one, flop in zip(made, work, strict=True)) / peak
    print(f"  {total * 1e3:.1f} ms in all; {least * 1e3:.1f} at the rate of 2048 x 2048 x 2048")


if __name__ == "__main__":
    main()
