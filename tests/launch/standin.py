"""Stands in for `gcloud`, `kubectl`, `sbatch` and others: knows their flags, keeps a small cloud, fails on demand.

`main(PROGRAM, ARGUMENT, ...)` is one call. `$STANDIN` is a folder: `calls.jsonl` gets a line a call, `cloud.json` is
the cloud, `faults.json` says what shall go wrong: a name and a value, or a list of values, one a time that it is asked.
Flags are those of flags.json; one that is not there is refused as the program would, with exit status 2.

What the cloud does is what these pages of docs.cloud.google.com say: tpu/docs/queued-resources (states; a request with
nodes is deleted only with --force; SUSPENDED stays), compute/docs/instance-groups/about-bulk-mode (all VMs or none),
compute/docs/tpus/create-tpu-mig-multi-host-slice (a slice of several hosts needs bulk mode).
"""

import fcntl
import json
import os
import sys

FOLDER = os.environ.get("STANDIN", ".")


def read(path: str) -> str:
    # Not by pathlib, which takes a fifth of the time that a call takes.
    with open(path) as file:
        return file.read()


FLAGS = json.loads(read(os.path.join(os.path.dirname(__file__), "flags.json")))["commands"]


class Refused(Exception):
    """A message on standard error and an exit status."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def parse(program: str, arguments: list[str]) -> tuple[str, list[str], dict[str, list[str]], list[str]]:
    """The command, its positionals, its flags with their values, and what stands after `--` (or after a job's script).

    Raises:
      Refused: there is no such command or flag, or a value is missing, not one of the allowed, or given where none is.
    """
    words = [word for word in arguments if not word.startswith("-")]
    names = [" ".join([program, *words[:count]]) for count in range(len(words), -1, -1)]
    command = next(name for name in names if name in FLAGS)
    if command == program and any(name.startswith(f"{program} ") for name in FLAGS):
        raise Refused(f"ERROR: ({program}) Invalid choice: {' '.join(words[:4])!r}.", 2)
    known = {**FLAGS.get(program, {}), **FLAGS[command]}
    skip = len(command.split()) - 1
    positionals: list[str] = []
    flags: dict[str, list[str]] = {}
    rest = iter(arguments)
    for word in rest:
        if word == "--":
            return command, positionals, flags, list(rest)
        if not word.startswith("-"):
            if skip:
                skip -= 1
                continue
            positionals.append(word)
            if program == "sbatch":
                return command, positionals, flags, list(rest)
            continue
        name, equals, value = word.partition("=")
        kind = known.get(name) or (known.get("--" + name[5:]) if name.startswith("--no-") else None)
        if kind is None:
            raise Refused(f"ERROR: ({command}) unrecognized arguments: {word}", 2)
        if kind == "bool":
            if equals and value not in ("true", "false"):
                raise Refused(f"ERROR: ({command}) {name} takes no value: {word}", 2)
        elif not equals:
            value = next(rest, "")
            if not value:
                raise Refused(f"ERROR: ({command}) argument {name}: expected one argument", 2)
        if isinstance(kind, list) and value not in kind:
            raise Refused(f"ERROR: ({command}) argument {name}: Invalid choice: {value!r}", 2)
        flags.setdefault(name, []).append(value)
    return command, positionals, flags, []


def load(name: str) -> dict:
    path = os.path.join(FOLDER, name)
    return json.loads(read(path)) if os.path.exists(path) else {}


def store(name: str, value: object, mode: str = "w") -> None:
    with open(os.path.join(FOLDER, name), mode) as file:
        file.write(json.dumps(value) + "\n")


class Cloud:
    """What exists, what shall go wrong, and the one call that is made."""

    def __init__(self, command: str, positionals: list[str], flags: dict[str, list[str]]):
        self.state, self.faults = load("cloud.json"), load("faults.json")
        self.command, self.positionals, self.flags = command, positionals, flags

    def flag(self, name: str) -> str:
        if name not in self.flags:
            raise Refused(f"ERROR: ({self.command}) argument {name}: Must be specified.", 2)
        return self.flags[name][-1]

    def fault(self, name: str) -> object:
        """A fault's value; one that is a list gives its next each time, and nothing when it is used up."""
        value = self.faults.get(name)
        if isinstance(value, list):
            value = value.pop(0) if value else None
        return value

    def save(self) -> None:
        store("cloud.json", self.state)
        store("faults.json", self.faults)

    def thing(self, kind: str) -> dict:
        name = self.positionals[0]
        if name not in self.state.get(kind, {}):
            raise Refused(f"ERROR: ({self.command.replace(' ', '.')}) NOT_FOUND: Resource '{name}' was not found")
        return self.state[kind][name]

    def add(self, kind: str, thing: dict) -> None:
        name = self.positionals[0]
        if name in self.state.setdefault(kind, {}):
            raise Refused(f"ERROR: ({self.command}) ALREADY_EXISTS: Resource '{name}' already exists")
        self.state[kind][name] = thing

    def ssh(self, workers: list[str]) -> str:
        broken = self.fault("ssh_broken")
        broken = broken if isinstance(broken, list) else [broken] if broken else []
        said = self.fault("job") or "running"
        lines = []
        for worker in workers:
            if worker in broken or "all" in broken:
                raise Refused(f"ERROR: ({self.command}) [{worker}] exited with return code [255].", 255)
            lines.append(f"bertjax: {said}")
        return "\n".join(lines)


def answer(cloud: Cloud) -> str:
    """What a call prints, having changed the cloud."""
    if cloud.fault("network"):
        raise Refused(f"ERROR: ({cloud.command}) There was a problem refreshing your current auth tokens: timed out")
    steps = {"gcloud compute tpus": tpu, "gcloud compute": compute, "kubectl": kubernetes}
    for beginning, step in steps.items():
        if cloud.command.startswith(beginning):
            return step(cloud)
    return slurm(cloud)


def tpu(cloud: Cloud) -> str:
    kind, verb = cloud.command.split()[3:]
    cloud.flag("--zone")
    if kind == "tpu-vm":
        node = cloud.positionals[0]
        workers = [f"{node}/{index}" for index in range(4)]
        if verb == "ssh":
            return cloud.ssh([workers[int(cloud.flag("--worker"))]])
        return "4" if "networkEndpoints" in cloud.flag("--format") else str(cloud.fault("node_state") or "READY")
    if verb == "create":
        if cloud.fault("quota"):
            raise Refused("ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5sLitepodPerProjectPerZone' has been exceeded.")
        for name in ("--runtime-version", "--accelerator-type"):
            cloud.flag(name)
        script = cloud.flag("--metadata-from-file").partition("=")[2]
        cloud.add("requests", {"startup": read(script), "states": cloud.fault("states") or ["ACTIVE"]})
        return ""
    if verb == "list":
        return "\n".join(cloud.state.get("requests", {}))
    request = cloud.thing("requests")
    states = request["states"]
    if verb == "describe":
        if "failedData" in cloud.flags.get("--format", [""])[-1]:
            return str(cloud.fault("why") or "")
        if states == ["GONE"]:
            del cloud.state["requests"][cloud.positionals[0]]
            cloud.thing("requests")
        return states.pop(0) if len(states) > 1 else states[0]
    if verb == "delete":
        if "--force" not in cloud.flags:
            raise Refused("ERROR: FAILED_PRECONDITION: the queued resource has nodes; delete them first")
        request["states"] = ["DELETING"] if cloud.fault("stuck") else ["DELETING", "GONE"]
        return ""
    if states[0] != "ACTIVE":
        raise Refused(f"ERROR: ({cloud.command}) the queued resource is {states[0]}")
    return cloud.ssh(
        [f"{cloud.positionals[0]}/{index}" for index in range(4)] if cloud.flag("--worker") == "all" else ["0"]
    )


def compute(cloud: Cloud) -> str:
    words = cloud.command.split()[2:]
    if words == ["ssh"]:
        return cloud.ssh([cloud.positionals[0]])
    kind, verb = {
        "instance-templates": ("templates", words[1]),
        "resource-policies": ("policies", words[1]),
        "instance-groups": ("groups", words[-1]),
    }[words[0]]
    if kind != "groups":
        if verb == "delete":
            cloud.thing(kind)
            del cloud.state[kind][cloud.positionals[0]]
        else:
            startup = cloud.flags.get("--metadata-from-file", ["="])[-1].partition("=")[2]
            cloud.add(kind, {"startup": read(startup) if startup else "", **cloud.flags})
        return ""
    if verb == "list":
        return "\n".join(cloud.state.get("groups", {}))
    cloud.flag("--zone")
    if verb == "create":
        size = int(cloud.flag("--size"))
        template = cloud.flag("--template").rpartition("/")[2]
        if template not in cloud.state.get("templates", {}):
            raise Refused(f"ERROR: The resource 'instanceTemplates/{template}' was not found")
        if size > 1 and (
            cloud.flag("--target-size-policy-mode") != "bulk" or "/" not in cloud.flag("--workload-policy")
        ):
            raise Refused("ERROR: MIGs with TPU accelerator topology require BULK mode in target size policy")
        if cloud.fault("refused"):
            raise Refused("ERROR: (gcloud) Required 'compute.instanceGroupManagers.create' permission")
        cloud.add("groups", {"size": size, "states": cloud.fault("states") or ["RUNNING"]})
        return ""
    group = cloud.thing("groups")
    if verb == "describe":
        return cloud.positionals[0]
    if verb == "delete":
        group["states"] = ["STOPPING"] if cloud.fault("stuck") else ["STOPPING", "GONE"]
        return ""
    if verb == "list-errors":
        return str(cloud.fault("error") or "")
    states = group["states"]
    if states == ["GONE"]:
        del cloud.state["groups"][cloud.positionals[0]]
        cloud.thing("groups")
    state = states.pop(0) if len(states) > 1 else states[0]
    return "\n".join(f"{cloud.positionals[0]}-{index}\t{state}" for index in range(group["size"]) if state != "NONE")


def kubernetes(cloud: Cloud) -> str:
    verb = cloud.command.split()[1]
    if verb == "apply":
        if cloud.fault("refused"):
            raise Refused(
                'Error from server (Invalid): error when creating "-": spec.replicatedJobs: field is immutable'
            )
        cloud.state["applied"] = read(cloud.flag("--filename"))
        return "jobset.jobset.x-k8s.io/bert created"
    if verb == "delete":
        if cloud.fault("stuck"):
            raise Refused("error: timed out waiting for the condition on jobsets/bert")
        cloud.state.pop("applied", None)
        return "deleted"
    if verb == "logs":
        if cloud.fault("no_pods"):
            raise Refused("error: container bertjax is waiting to start: ContainerCreating")
        return "step 1"
    if cloud.positionals[0] == "jobset":
        if "applied" not in cloud.state:
            raise Refused('Error from server (NotFound): jobsets.jobset.x-k8s.io "bert" not found')
        return str(cloud.fault("terminal") or "")
    return cloud.positionals[0]


def slurm(cloud: Cloud) -> str:
    if cloud.command == "sbatch":
        if cloud.fault("refused"):
            raise Refused("sbatch: error: Batch job submission failed: Invalid account or partition specified")
        return "Submitted batch job 7"
    return str(cloud.fault("job_state") or "RUNNING") if cloud.command == "squeue" else ""


def main(program: str, *arguments: str) -> int:
    store("calls.jsonl", [program, *arguments], "a")
    try:
        command, positionals, flags, _ = parse(program, [*arguments])
        # Calls may be made side by side.
        with open(os.path.join(FOLDER, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            cloud = Cloud(command, positionals, flags)
            try:
                text = answer(cloud)
            finally:
                cloud.save()
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return refusal.code
    if text:
        print(text)
    return 0
