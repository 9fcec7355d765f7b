"""Attacks the program for as long as it takes, and says what came of it.

    python tests/attack/run.py --log runs/attack.jsonl
    python tests/attack/run.py --only damage-17 --keep

Every case is a function of the seed and its name. What the log has is not run again, so that the same command goes on
where it was stopped. Ends with a table, cases by what came of them, and each fault with the command that shows it.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

# Before JAX is imported with what makes configs.
os.environ["JAX_PLATFORMS"] = "cpu"

import damage
import kills
from invocations import invocations
from oracle import Finding
from sandbox import Sandbox, rng_of
from zygote import Starter


class Case(Protocol):
    """One thing to try."""

    name: str
    row: str

    def run(self, sandbox: Sandbox, starter: Starter) -> Finding:
        """Tries it in a folder of the case's own."""


def tried(case: Case, sandbox: Sandbox, starter: Starter, keep: bool = False) -> Finding:
    """What came of a case; an error of the harness itself is a fault, too."""
    try:
        return case.run(sandbox, starter)
    except Exception as error:  # One case must not end all.
        return Finding(case.row, "broken", (f"{type(error).__name__}: {error}"[:500],), "", ())
    finally:
        if not keep:
            folder = sandbox.folder / "cases" / case.name
            shutil.rmtree(folder, ignore_errors=True)


def table(findings: Sequence[Finding]) -> str:
    """Rows and outcomes, with the number of cases of each."""
    outcomes = sorted({finding.outcome for finding in findings})
    rows = sorted({finding.row for finding in findings})
    width = 2 + max(map(len, [*rows, "total"]))
    lines = [f"{'':<{width}}{'cases':>8}{'blows':>8}" + "".join(f"{name:>9}" for name in outcomes) + f"{'faults':>9}"]
    for row in [*rows, "total"]:
        chosen = [finding for finding in findings if row in (finding.row, "total")]
        counts = Counter(finding.outcome for finding in chosen)
        line = f"{row:<{width}}{len(chosen):>8}{sum(finding.blows for finding in chosen):>8}"
        lines.append(line + "".join(f"{counts[name] or '':>9}" for name in outcomes))
        lines[-1] += f"{sum(bool(finding.faults) for finding in chosen):>9}"
    return "\n".join(lines)


def _read(log: Path, seed: int) -> dict[str, dict[str, Any]]:
    if not log.exists():
        return {}
    lines = map(json.loads, log.read_text().splitlines())
    return {line["name"]: line["finding"] for line in lines if line["seed"] == seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--invocations", type=int, help="wrong invocations (default: all)")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--damages", type=int, default=2000)
    parser.add_argument("--program", type=float, default=0.02, help="share of cases run with the program as installed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--log", type=Path, help="a line of JSON a case; goes on where it was stopped")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases")
    parser.add_argument("--keep", action="store_true", help="leave the folders of the cases")
    args = parser.parse_args()
    cases: list[Case] = [
        *invocations(args.seed)[: args.invocations],
        *damage.damages(args.damages, args.seed, damage.References()),
        *kills.kills(args.kills, args.seed, kills.References()),
    ]
    known = _read(args.log, args.seed) if args.log and not args.only else {}
    findings = {name: Finding(**{**found, "faults": tuple(found["faults"])}) for name, found in known.items()}
    chosen = [case for case in cases if case.name in args.only] if args.only else cases
    left = [case for case in chosen if case.name not in findings]
    sandbox = Sandbox()
    began = time.monotonic()

    def attack(case: Case) -> None:
        by_program = rng_of(args.seed, case.name, "program").random() < args.program
        finding = tried(case, sandbox, sandbox.program if by_program else sandbox.zygote, args.keep)
        findings[case.name] = finding
        if args.log:
            line = json.dumps({"seed": args.seed, "name": case.name, "finding": dataclasses.asdict(finding)})
            with args.log.open("a") as file:
                file.write(line + "\n")
        if finding.faults or args.only:
            print(f"{case.name} ({finding.row}): {'; '.join(finding.faults)} | {finding.detail}", flush=True)
        done = next(count)
        if done % 50 == 0:
            print(f"{done:,} of {len(left):,} cases in {time.monotonic() - began:,.0f} s", flush=True)

    count = itertools.count(1)
    if args.log:
        args.log.parent.mkdir(parents=True, exist_ok=True)
    pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
    try:
        list(pool.map(attack, left))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here")
    finally:
        pool.shutdown(cancel_futures=True)
        if args.keep:
            print(f"left: {sandbox.folder}/cases")
            sandbox.zygote.close()
        else:
            sandbox.close()
    print(table(list(findings.values())))
    faulty = {name: finding for name, finding in findings.items() if finding.faults}
    for name, finding in faulty.items():
        print(f"\n{name} ({finding.row}): {'; '.join(finding.faults)}\n  {finding.detail}")
        print(f"  bertjax {shlex.join(finding.command)[:1000]}")
        print(f"  python tests/attack/run.py --seed {args.seed} --only {name} --keep")
    sys.exit(1 if faulty else 0)


if __name__ == "__main__":
    main()
