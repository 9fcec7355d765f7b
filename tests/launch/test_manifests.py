"""What GKE, SkyPilot and a container get: held against their schemas, and against what an exit status shall lead to."""

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMAS = {file.stem: json.loads(file.read_text()) for file in (Path(__file__).parent / "schemas").glob("*.json")}
IMAGE = "us-docker.pkg.dev/p/bertjax/tpu:1"
COMMAND = [
    "bertjax",
    "train",
    "--config",
    'pretrain:corpus=gs://b/"c",d=\\e ${NAME}',
    "--workdir",
    "gs://b/runs: #base",
]


def documents(*options: str) -> list[dict]:
    """What launch/gke.sh applies."""
    given = ["--accelerator", "tpu-v5p-slice", "--topology", "4x4x8", "--image", IMAGE, "--dry-run", *options]
    printed = subprocess.run(
        [ROOT / "launch" / "gke.sh", "create", "bert", *given, "--", *COMMAND],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return list(yaml.safe_load_all(printed[: printed.index("\nkubectl")]))


@pytest.fixture(scope="module")
def one_slice() -> list[dict]:
    return documents()


@pytest.fixture(scope="module")
def four_slices() -> list[dict]:
    return documents("--slices", "4", "--queue", "tpus", "--namespace", "research", "--service-account", "trainer")


def validate(document: dict, schema: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[schema]).validate(document)


def pod(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_the_manifests_are_what_the_servers_take(one_slice, four_slices):
    for account, jobset in (one_slice, four_slices):
        validate(account, "serviceaccount")
        validate(jobset, "jobset")


def test_one_slice_and_several_differ_in_what_was_given(one_slice, four_slices):
    for (account, jobset), slices, name in ((one_slice, 1, "bertjax"), (four_slices, 4, "trainer")):
        (job,) = jobset["spec"]["replicatedJobs"]
        # 4 x 4 x 8 chips, four a host.
        assert job["replicas"] == slices
        assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == 32
        assert account["metadata"]["name"] == pod(jobset)["serviceAccountName"] == name
        assert account["metadata"]["namespace"] == jobset["metadata"]["namespace"]
        (container,) = pod(jobset)["containers"]
        assert container["args"] == COMMAND and container["image"] == IMAGE
        assert container["resources"]["limits"] == {"google.com/tpu": 4}
        assert "MEGASCALE" not in json.dumps(jobset)
    queue = "kueue.x-k8s.io/queue-name"
    assert four_slices[1]["metadata"]["labels"][queue] == "tpus" and queue not in one_slice[1]["metadata"]["labels"]


def test_a_pod_has_room_to_stage_and_time_to_save(one_slice):
    spec = pod(one_slice[1])
    (container,) = spec["containers"]
    assert spec["terminationGracePeriodSeconds"] >= 180
    (mount,) = container["volumeMounts"]
    assert {"name": "BERTJAX_STAGING", "value": mount["mountPath"]} in container["env"]
    assert [volume["name"] for volume in spec["volumes"]] == [mount["name"]]


def fields(node: object, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all fields that have a name of their own, from the outside in."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(key, str) and path[-1:] not in (("labels",), ("annotations",), ("nodeSelector",), ("limits",)):
            yield (*path, key)
        yield from fields(value, (*path, key))


def test_a_misspelt_field_is_refused_wherever_it_is(one_slice):
    jobset = one_slice[1]
    paths = list(fields(jobset))
    assert len(paths) > 60 and len({len(path) for path in paths}) >= 8
    for path in paths:
        wrong = copy.deepcopy(jobset)
        node = wrong
        for key in path[:-1]:
            node = node[key]
        node[path[-1] + "s"] = node.pop(path[-1])
        with pytest.raises(jsonschema.ValidationError):
            validate(wrong, "jobset")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "failurePolicy", "rules", 0, "action"), "RestartAll"),
        (("spec", "failurePolicy", "maxRestarts"), "20"),
        (
            ("spec", "replicatedJobs", 0, "template", "spec", "podFailurePolicy", "rules", 1, "onExitCodes", "values"),
            42,
        ),
    ],
)
def test_a_wrong_value_is_refused(one_slice, path, value):
    wrong = copy.deepcopy(one_slice[1])
    node = wrong
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong, "jobset")


def job_failure(job: dict, exit_code: int, conditions: set[str]) -> tuple[str, str]:
    """Reason and message of a Job, one pod of which ended so: Kubernetes, pkg/controller/job/pod_failure_policy.go."""
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        codes = rule.get("onExitCodes")
        if codes and (exit_code in codes["values"]) == (codes["operator"] == "In") and exit_code != 0:
            container = codes["containerName"]
            return "PodFailurePolicy", (
                f"Container {container} for pod default/bert-slice-0-0-x failed with exit code {exit_code} "
                f"matching FailJob rule at index {index}"
            )
        for condition in rule.get("onPodConditions", ()):
            if condition["type"] in conditions:
                has = f"Pod default/bert-slice-0-0-x has condition {condition['type']}"
                return "PodFailurePolicy", f"{has} matching FailJob rule at index {index}"
    assert job["backoffLimit"] == 0
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def action(jobset: dict, failures: list[tuple[int, set[str]]]) -> str:
    """What JobSet does when Jobs failed so, in this order: jobset, pkg/controllers/failure_policy.go."""
    (job,) = jobset["spec"]["replicatedJobs"]
    told = [job_failure(job["template"]["spec"], *failure) for failure in failures]
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        for reason, message in told:
            patterns = rule["onJobFailureMessagePatterns"]
            if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
                return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([(42, set())], "RestartJobSetAndIgnoreMaxRestarts"),
        ([(143, {"DisruptionTarget"})], "RestartJobSetAndIgnoreMaxRestarts"),
        ([(1, {"DisruptionTarget"})], "RestartJobSetAndIgnoreMaxRestarts"),
        ([(43, set())], "RestartJobSet"),
        ([(137, set())], "RestartJobSet"),
        ([(139, set())], "RestartJobSet"),
        ([(143, set())], "RestartJobSet"),
        ([(1, set())], "FailJobSet"),
        ([(2, set())], "FailJobSet"),
        # Of several slices, the one that would fail again decides, whoever misses it first.
        ([(43, set()), (42, set()), (1, set())], "FailJobSet"),
        ([(43, set()), (42, set())], "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)
def test_what_an_exit_status_leads_to(one_slice, failures, expected):
    assert action(one_slice[1], failures) == expected


def test_the_rules_are_of_the_container_that_there_is(one_slice):
    job = one_slice[1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = pod(one_slice[1])["containers"]
    named = {rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    # A Job takes a podFailurePolicy only with it.
    assert named == {container["name"]} and pod(one_slice[1])["restartPolicy"] == "Never"
    names = [rule["name"] for rule in one_slice[1]["spec"]["failurePolicy"]["rules"]]
    assert len({*names}) == len(names) and all(
        re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name) for name in names
    )


def test_the_schemas_say_where_they_are_from():
    assert {*SCHEMAS} == {"jobset", "serviceaccount", "skypilot"}
    assert all("Apache-2.0" in schema["$comment"] and "derive.py" in schema["$comment"] for schema in SCHEMAS.values())


def test_skypilot_takes_its_yaml_and_restarts_what_can_go_on():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    validate(task, "skypilot")
    recovery = task["resources"]["job_recovery"]
    assert {42, 43, 137, 139} <= {*recovery["recover_on_exit_codes"]} and not {1, 2} & {
        *recovery["recover_on_exit_codes"]
    }
    # It would restart after any failure.
    assert "max_restarts_on_errors" not in recovery
    for wrong in ({**task, "resource": {}}, {**task, "resources": {**task["resources"], "use_spott": True}}):
        with pytest.raises(jsonschema.ValidationError):
            validate(wrong, "skypilot")


def test_the_image_is_pinned_and_takes_only_what_there_is():
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    (base,) = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert re.fullmatch(r"python:3\.1\d\.\d+-slim-\w+", base)
    assert any("--constraint constraints.txt" in line for line in lines)
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"jax", "jaxlib", "libtpu"} <= pinned
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for source in (word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]):
        assert (ROOT / source).exists() and f"!{source}" in allowed, source
