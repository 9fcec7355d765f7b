"""Attacks all commands with wrong arguments, kills and damaged files, and prints a table and every fault.

    python tests/attack/run.py --log runs/attack.jsonl

The full attack takes hours. A case depends only on the seed and its name. A repeated command skips logged cases.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from damage import damages
from invocations import invocations
from kills import kills
from oracle import Report
from sandbox import Sandbox


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--invocations", type=int, help="number of wrong invocations (default: all)")
    parser.add_argument("--kills", type=int, default=1000, help="number of kills")
    parser.add_argument("--damages", type=int, default=2000, help="number of damaged files")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="number of parallel cases")
    parser.add_argument("--log", type=Path, help="JSON lines file of finished cases; resumed if it exists")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these cases, without the log")
    parser.add_argument("--compiled", default="", metavar="DIR", help="compilation cache (default: a new one)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the cases")
    args = parser.parse_args()
    sandbox = Sandbox(Path(tempfile.mkdtemp(prefix="bertjax-attack-")), args.compiled)
    # Import before the first fork, so that commands start fast. The imports read the environment variables that are set
    # here, and start no threads, so that forks are safe.
    os.environ.update(sandbox.env)
    for module in ("flax.linen", "matplotlib.figure", "optax", "orbax.checkpoint", "tensorflow"):
        __import__(module)
    cases = [*invocations(args.seed)[: args.invocations], *damages(args.damages, args.seed)]
    cases = [case for case in (*cases, *kills(args.kills, args.seed)) if not args.only or case.name in args.only]
    reports: dict[str, Report] = {}
    log = args.log if args.log and not args.only else Path(os.devnull)
    log.parent.mkdir(parents=True, exist_ok=True)
    for seed, name, report in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
        reports |= {name: Report(*report)} if seed == args.seed else {}
    pool = concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork"))
    futures = {pool.submit(case.run, sandbox, args.keep): case.name for case in cases if case.name not in reports}
    try:
        for count, future in enumerate(concurrent.futures.as_completed(futures), 1):
            report = reports[name := futures[future]] = future.result()
            with log.open("a") as file:
                file.write(json.dumps([args.seed, name, report]) + "\n")
            if report.faults or count % 50 == 0:
                print(f"{count}/{len(futures)} {name} ({report.row}): {report.faults}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; with --log, the same command resumes")
    finally:
        pool.shutdown(cancel_futures=True)
        if not args.keep:
            shutil.rmtree(sandbox.folder, ignore_errors=True)
    results = Counter((report.row, report.result) for report in reports.values())
    print("\n".join(f"{row:26}{result:10}{count:>6}" for (row, result), count in sorted(results.items())))
    faulty = {name: report for name, report in reports.items() if report.faults}
    for name, report in faulty.items():
        print(f"\n{name} ({report.row}): {'; '.join(report.faults)}\n  {report.detail}")
        print(f"  bertjax {shlex.join(report.argv)[:1000]}")
        print(f"  python tests/attack/run.py --seed {args.seed} --only {name} --keep")
    print(f"{len(reports)} cases, {len(faulty)} with faults")
    sys.exit(bool(faulty))


if __name__ == "__main__":
    main()
