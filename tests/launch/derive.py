"""Writes `schemas/` and `flags.json` anew, from the programs and schemas that manifests and scripts are held against.

    pip install pyyaml kubernetes-validate skypilot xpk
    python tests/launch/derive.py schemas jobset_crd.yaml    # JobSet's CustomResourceDefinition, config/components/crd
    python tests/launch/derive.py flags "$(dirname "$(readlink -f "$(which gcloud)")")/.."

`flags` asks the installed `gcloud`, `kubectl`, `docker`, `sky` and `xpk`; what they cannot be asked for is written
below with its page.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
KUBERNETES = "v1.37.0-local-strict"

GCLOUD = """
artifacts docker images list; artifacts repositories create; artifacts repositories delete; auth configure-docker
auth login; compute instance-groups managed create; compute instance-groups managed delete
compute instance-groups managed describe; compute instance-groups managed list
compute instance-groups managed list-instances; compute instance-groups managed list-errors
compute instance-templates create; compute instance-templates delete
compute resource-policies create workload-policy; compute resource-policies delete; compute ssh
compute tpus queued-resources create; compute tpus queued-resources delete; compute tpus queued-resources describe
compute tpus queued-resources list; compute tpus queued-resources ssh; compute tpus tpu-vm describe
compute tpus tpu-vm list; compute tpus tpu-vm ssh; container clusters create; container clusters delete
container clusters get-credentials; container clusters list; container node-pools create; container node-pools delete
container node-pools list; config set; iam service-accounts create; iam service-accounts delete; projects create
projects delete; projects describe; projects add-iam-policy-binding; services enable; billing projects link
storage buckets create; storage buckets add-iam-policy-binding; storage buckets delete; storage cp; storage ls
storage rm; storage rsync; compute tpus accelerator-types list; compute tpus versions list
"""
KUBECTL = "apply; delete; describe; exec; get; logs; wait; config; auth; rollout status; create; top"
# Not in the `gcloud` 528.0.0 that was asked; by the page named.
LATER = {
    "gcloud compute instance-groups managed create": {
        # docs.cloud.google.com/compute/docs/instance-groups/about-bulk-mode
        "--target-size-policy-mode": ["bulk", "individual"],
    },
    "gcloud compute resource-policies create workload-policy": {
        # docs.cloud.google.com/sdk/gcloud/reference/compute/resource-policies/create/workload-policy
        "--accelerator-topology-mode": ["AUTO_CONNECT", "PROVISION_ONLY"],
    },
}
# slurm.schedmd.com/sbatch.html, srun.html, scontrol.html, squeue.html, scancel.html: what is used, and its neighbours.
SLURM = {
    "sbatch": {
        "bool": "--requeue --no-requeue --parsable --exclusive --hold --test-only --wait",
        "value": "--nodes --ntasks --ntasks-per-node --gres --gpus --gpus-per-node --gpus-per-task --cpus-per-task "
        "--mem --time --partition --account --qos --job-name --output --error --open-mode --signal --constraint "
        "--export --chdir --dependency --comment --reservation",
    },
    "srun": {
        "bool": "--label --unbuffered --exclusive --overlap",
        "value": "--nodes --ntasks --ntasks-per-node --gres --cpu-bind --jobid --output --signal --kill-on-bad-exit",
    },
    "scontrol": {"bool": "--oneliner", "value": ""},
    "squeue": {"bool": "--me --noheader --start", "value": "--name --jobs --format --user --states"},
    "scancel": {"bool": "--full --batch --verbose", "value": "--name --signal --user --state"},
}


def closed(schema: dict) -> dict:
    """Without what only a reader needs, and with every unknown field refused."""
    kept: dict = {}
    for key, value in schema.items():
        if key in ("description", "default", "format") or key.startswith("x-kubernetes-"):
            continue
        if key in ("properties", "definitions"):
            kept[key] = {name: closed(part) for name, part in value.items()}
        elif isinstance(value, dict):
            kept[key] = closed(value)
        elif isinstance(value, list):
            kept[key] = [closed(part) if isinstance(part, dict) else part for part in value]
        else:
            kept[key] = value
    if "properties" in kept:
        kept.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        kept = {"type": ["integer", "string"]}
    return kept


def inlined(node: object, definitions: dict) -> object:
    """With each reference into Kubernetes' definitions replaced by what it leads to."""
    if isinstance(node, list):
        return [inlined(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: inlined(part, definitions) for key, part in node.items() if key not in ("$id", "$schema")}


def shared(schema: dict) -> dict:
    """Equal parts said once, under `$defs`."""
    seen: dict[str, int] = {}

    def count(node: object) -> None:
        if isinstance(node, dict):
            text = json.dumps(node, sort_keys=True)
            seen[text] = seen.get(text, 0) + 1
            if seen[text] == 1:
                for part in node.values():
                    count(part)
        elif isinstance(node, list):
            for part in node:
                count(part)

    names: dict[str, str] = {}
    definitions: dict[str, object] = {}

    def fold(node: object, is_schema: bool = True) -> object:
        if isinstance(node, list):
            return [fold(part) for part in node]
        if not isinstance(node, dict):
            return node
        text = json.dumps(node, sort_keys=True)
        folded = {key: fold(part, is_schema=key not in ("properties",)) for key, part in node.items()}
        if not is_schema or seen.get(text, 0) < 2 or len(text) < 120:
            return folded
        if text not in names:
            names[text] = f"d{len(names)}"
            definitions[names[text]] = folded
        return {"$ref": f"#/$defs/{names[text]}"}

    count(schema)
    top = {key: fold(part, is_schema=key != "properties") for key, part in schema.items()}
    return {**top, "$defs": definitions}


def write(name: str, source: str, licence: str, schema: dict) -> None:
    stated = {"$comment": f"Derived by tests/launch/derive.py from {source}; {licence}.", **shared(closed(schema))}
    (HERE / "schemas" / f"{name}.json").write_text(json.dumps(stated, separators=(",", ":")) + "\n")


def write_schemas(crd: Path) -> None:
    import kubernetes_validate
    import yaml
    from sky.utils import schemas as sky

    (version,) = yaml.safe_load(crd.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"].pop("status")
    # Metadata is any object to a CRD; the server holds it against ObjectMeta.
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / KUBERNETES
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    account = inlined(json.loads((folder / "serviceaccount-v1.json").read_text()), definitions)
    schema["properties"]["metadata"] = account["properties"]["metadata"]
    write("jobset", "kubernetes-sigs/jobset at 08dfbdf (its CustomResourceDefinition)", "Apache-2.0", schema)
    write("serviceaccount", f"Kubernetes' OpenAPI, {KUBERNETES} of kubernetes-validate 1.37.0", "Apache-2.0", account)
    task, resources = sky.get_task_schema(), sky.get_resources_schema()
    for unused in ("service", "pool", "config", "inputs", "outputs", "_metadata", "file_mounts_mapping"):
        task["properties"].pop(unused, None)
    for unused in ("any_of", "ordered", "_cluster_config_overrides", "volumes"):
        resources["properties"].pop(unused, None)
    task["properties"]["resources"] = resources
    write("skypilot", "SkyPilot 0.14.1, sky/utils/schemas.py", "Apache-2.0", task)


def gcloud_flags(sdk: Path) -> dict[str, dict]:
    sys.path.insert(0, str(sdk / "data" / "cli"))
    import gcloud_completions

    tree = gcloud_completions.STATIC_COMPLETION_CLI_TREE
    found = {}
    for command in re.split(r"[;\n]\s*", GCLOUD.strip()):
        node = tree
        for word in command.split():
            node = node["commands"][word]
        flags = {**node["flags"], **LATER.get(f"gcloud {command}", {})}
        found[f"gcloud {command}"] = {name: "value" if kind == "dynamic" else kind for name, kind in flags.items()}
    return {"gcloud": {name: "value" if kind == "dynamic" else kind for name, kind in tree["flags"].items()}, **found}


def kubectl_flags() -> dict[str, dict]:
    found = {}
    for command in ["options", *KUBECTL.split("; ")]:
        asked = ["kubectl", "options"] if command == "options" else ["kubectl", *command.split(), "--help"]
        text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        flags = {}
        for short, name, default in re.findall(r"^    (-\w, )?(--[\w-]+)=(.*):$", text, re.MULTILINE):
            kind = "bool" if default in ("true", "false") else "value"
            flags |= {name: kind, **({short[:2]: kind} if short else {})}
        found["kubectl" if command == "options" else f"kubectl {command}"] = flags
    return found


def listed_flags() -> dict[str, dict]:
    """Of programs whose help has a line an option: names and value, then the meaning after several spaces."""
    found = {}
    for command in (
        "xpk workload create",
        "sky jobs launch",
        "sky jobs logs",
        "sky jobs queue",
        "sky jobs cancel",
        "docker build",
        "docker push",
    ):
        asked = [*command.split(), "--help"]
        text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        flags = {}
        for line in re.findall(r"^ {2,6}(-.*)$", re.split(r"\n[Oo]ptions:", text)[-1], re.MULTILINE):
            head = re.split(r" {2,}", line)[0]
            kind = "bool" if head.split()[-1].startswith("-") else "value"
            flags |= dict.fromkeys(re.findall(r"(?<![\w-])--?\w[\w-]*", head), kind)
        found[command] = flags
    return found


def slurm_flags() -> dict[str, dict]:
    return {
        program: {name: kind for kind, names in kinds.items() for name in names.split()}
        for program, kinds in SLURM.items()
    }


def main(what: str, path: str) -> None:
    if what == "schemas":
        write_schemas(Path(path))
        return
    flags = {**gcloud_flags(Path(path)), **kubectl_flags(), **listed_flags(), **slurm_flags()}
    sources = {
        "gcloud": "gcloud 528.0.0, its table of completions; what is newer is in LATER of derive.py",
        "kubectl": "kubectl 1.32.4 --help",
        "xpk, sky, docker": "--help of xpk 1.16.0, SkyPilot 0.14.1, Docker 28.2.2",
        "Slurm": "slurm.schedmd.com, written by hand in derive.py",
    }
    (HERE / "flags.json").write_text(
        "{\n"
        + f'"sources": {json.dumps(sources)},\n"commands": {{\n'
        + ",\n".join(
            f"{json.dumps(name)}: {json.dumps(kinds, sort_keys=True)}" for name, kinds in sorted(flags.items())
        )
        + "\n}\n}\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
