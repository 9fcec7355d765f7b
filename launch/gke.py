#!/usr/bin/env python3
"""Prints a JobSet manifest for GKE that runs a command on every host of one or more TPU slices.

    launch/gke.py base --accelerator=tpu-v5-lite-podslice --topology=4x4 \\
      --image=us-docker.pkg.dev/PROJECT/bertjax/tpu -- \\
      bertjax train --distributed --config pretrain:size=base,corpus=gs://BUCKET/corpus \\
      --workdir gs://BUCKET/runs/base | kubectl apply --filename=-
"""

import argparse
import json
import math
import re
import string
from pathlib import Path

TEMPLATE = Path(__file__).with_name("jobset.yaml")
KUBERNETES_NAME = "[a-z]([a-z0-9-]{0,38}[a-z0-9])?"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the JobSet: at most 40 lower-case letters, digits and -")
    parser.add_argument("--accelerator", required=True, help="node pool label, such as tpu-v5-lite-podslice")
    parser.add_argument("--topology", required=True, help="node pool label, such as 4x4 or 4x4x8")
    parser.add_argument("--image", required=True, help="container image")
    parser.add_argument("--chips", type=int, default=4, help="TPU chips per host (default: 4)")
    parser.add_argument("--slices", type=int, default=1, help="number of slices, one node pool each (default: 1)")
    parser.add_argument("--queue", help="Kueue LocalQueue (default: none)")
    parser.add_argument(
        "--max-restarts", type=int, default=20, help="maximum restarts after failures, not preemptions (default: 20)"
    )
    parser.add_argument("--namespace", default="default", help="Kubernetes namespace (default: default)")
    parser.add_argument(
        "--service-account", default="bertjax", help="Kubernetes service account, created if missing (default: bertjax)"
    )
    parser.add_argument("command", nargs="+", help="command and its arguments, after --")
    args = parser.parse_args()
    if not re.fullmatch(KUBERNETES_NAME, args.name):
        parser.error(f"invalid name: {args.name}; use at most 40 lower-case letters, digits and -")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", args.topology):
        parser.error(f"invalid --topology: {args.topology}; use a form such as 4x4 or 4x4x8")
    if args.chips < 1 or args.slices < 1 or args.max_restarts < 0:
        parser.error("--chips and --slices must be at least 1, --max-restarts at least 0")
    if num_chips(args.topology) % args.chips:
        parser.error(f"--topology={args.topology} has {num_chips(args.topology)} chips, not a multiple of {args.chips}")
    return args


def num_chips(topology: str) -> int:
    return math.prod(map(int, topology.split("x")))


def manifest(args: argparse.Namespace) -> str:
    """Returns the manifest: the template with JSON values, which are valid YAML."""
    labels = {"app.kubernetes.io/name": "bertjax"}
    if args.queue:
        labels["kueue.x-k8s.io/queue-name"] = args.queue
    values = {**vars(args), "labels": labels, "hosts": num_chips(args.topology) // args.chips}
    template = string.Template(TEMPLATE.read_text())
    return template.substitute({key: json.dumps(value, ensure_ascii=False) for key, value in values.items()})


if __name__ == "__main__":
    print(manifest(parse_args()), end="")
