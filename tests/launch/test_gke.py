"""The GKE manifest and the SkyPilot task match their schemas, and restart a run according to its exit status."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMAS = {file.stem: json.loads(file.read_text()) for file in (Path(__file__).parent / "schemas").glob("*.json")}
IMAGE = "us-docker.pkg.dev/p/bertjax/tpu:1"
COMMAND = ["bertjax", "train", "--config", 'pretrain:corpus=gs://b/"c",d=\\e\t${name} é', "gs://b/runs: #1"]
OPTIONS = ["--accelerator=tpu-v5p-slice", "--topology=4x4x8", f"--image={IMAGE}"]


def run_gke(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "launch" / "gke.py", *arguments], capture_output=True, text=True)


def manifests(*options: str) -> list[dict]:
    """Returns the service account and the JobSet that launch/gke.py prints."""
    process = run_gke("bert", *OPTIONS, *options, "--", *COMMAND)
    assert process.returncode == 0, process.stderr
    return list(yaml.safe_load_all(process.stdout))


@pytest.fixture(scope="module")
def one_slice() -> list[dict]:
    return manifests()


def validate(document: dict, schema: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[schema]).validate(document)


def pod_spec(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["bert", *OPTIONS], "arguments are required: command"),
        (["Bert", *OPTIONS, "--", "true"], "invalid name: Bert"),
        (["bert", *OPTIONS, "--topology=0x4", "--", "true"], "invalid --topology: 0x4"),
        (["bert", *OPTIONS, "--topology=3x3", "--", "true"], "--topology=3x3 has 9 chips, not a multiple of 4"),
        (["bert", *OPTIONS, "--slices=0", "--", "true"], "--slices must be at least 1"),
        (["bert", *OPTIONS, "--slice-count=2", "--", "true"], "unrecognized arguments: --slice-count=2"),
    ],
)
def test_invalid_options_exit_with_2(options, message):
    process = run_gke(*options)
    assert process.returncode == 2 and message in process.stderr and not process.stdout


def test_options_reach_the_manifest(one_slice):
    four_slices = manifests("--slices=4", "--queue=tpus", "--namespace=research", "--service-account=trainer")
    for (account, jobset), slices, name in ((one_slice, 1, "bertjax"), (four_slices, 4, "trainer")):
        validate(jobset, "jobset")
        (job,) = jobset["spec"]["replicatedJobs"]
        assert job["replicas"] == slices
        # 4 x 4 x 8 chips, four per host.
        assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == 32
        assert account["metadata"]["name"] == pod_spec(jobset)["serviceAccountName"] == name
        assert account["metadata"]["namespace"] == jobset["metadata"]["namespace"]
        (container,) = pod_spec(jobset)["containers"]
        assert container["args"] == COMMAND and container["image"] == IMAGE
        assert container["resources"]["limits"] == {"google.com/tpu": 4}
    queue = "kueue.x-k8s.io/queue-name"
    assert four_slices[1]["metadata"]["labels"][queue] == "tpus" and queue not in one_slice[1]["metadata"]["labels"]


def job_failure(job: dict, exit_code: int, conditions: set[str]) -> tuple[str, str]:
    """Returns reason and message of a failed Job, as Kubernetes' pkg/controller/job/pod_failure_policy.go does."""
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        matching = f"matching FailJob rule at index {index}"
        codes = rule.get("onExitCodes")
        if codes and exit_code in codes["values"]:
            container = f"Container {codes['containerName']} for pod default/x"
            return "PodFailurePolicy", f"{container} failed with exit code {exit_code} {matching}"
        for condition in rule.get("onPodConditions", ()):
            if condition["type"] in conditions:
                return "PodFailurePolicy", f"Pod default/x has condition {condition['type']} {matching}"
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def jobset_action(jobset: dict, failures: list[tuple[int, set[str]]]) -> str:
    """Returns the action for failed Jobs, as JobSet's pkg/controllers/failure_policy.go does."""
    (job,) = jobset["spec"]["replicatedJobs"]
    messages = [job_failure(job["template"]["spec"], *failure) for failure in failures]
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        for reason, message in messages:
            patterns = rule["onJobFailureMessagePatterns"]
            if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
                return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        *(([(code, set())], "RestartJobSetAndIgnoreMaxRestarts") for code in (42, 130)),
        ([(143, {"DisruptionTarget"})], "RestartJobSetAndIgnoreMaxRestarts"),
        ([(1, {"DisruptionTarget"})], "RestartJobSetAndIgnoreMaxRestarts"),
        *(([(code, set())], "RestartJobSet") for code in (43, 134, 137, 139, 143)),
        *(([(code, set())], "FailJobSet") for code in (1, 2)),
        # If slices fail differently, an error that a restart would repeat takes precedence over lost processes.
        ([(43, set()), (42, set()), (1, set())], "FailJobSet"),
        ([(43, set()), (42, set())], "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)
def test_exit_status_decides_whether_a_run_restarts(one_slice, failures, expected):
    assert jobset_action(one_slice[1], failures) == expected


def test_pod_has_scratch_space_and_time_to_save(one_slice):
    job, spec = one_slice[1]["spec"]["replicatedJobs"][0]["template"]["spec"], pod_spec(one_slice[1])
    (container,) = spec["containers"]
    (mount,) = container["volumeMounts"]
    assert spec["terminationGracePeriodSeconds"] >= 180
    assert {"name": "BERTJAX_STAGING", "value": mount["mountPath"]} in container["env"]
    assert [volume["name"] for volume in spec["volumes"]] == [mount["name"]]
    # Failure rules refer to the container by name.
    names = {rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    # Kubernetes requires restartPolicy: Never for a podFailurePolicy.
    assert names == {container["name"]} and spec["restartPolicy"] == "Never" and job["backoffLimit"] == 0


def test_skypilot_task_restarts_only_after_resumable_exit_codes():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    validate(task, "skypilot")
    recovery = task["resources"]["job_recovery"]
    codes = {*recovery["recover_on_exit_codes"]}
    assert {42, 43, 134, 137, 139} <= codes and not {1, 2} & codes
    # This field would restart the job after any failure.
    assert "max_restarts_on_errors" not in recovery
    for changed in ({**task, "resource": {}}, {**task, "resources": {**task["resources"], "use_spott": True}}):
        with pytest.raises(jsonschema.ValidationError):
            validate(changed, "skypilot")


def test_image_pins_versions_and_copies_only_existing_files():
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    (base,) = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert re.fullmatch(r"python:3\.1\d\.\d+-slim-\w+", base)
    assert any("--constraint constraints.txt" in line for line in lines)
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"jax", "jaxlib", "libtpu"} <= pinned
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for source in (word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]):
        assert (ROOT / source).exists() and f"!{source}" in allowed, source
