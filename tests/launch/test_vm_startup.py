"""What runs on a TPU VM at boot."""

import subprocess

import pytest
from pretending import LAUNCH, TPU, Pretended, told


def vm(pretended: Pretended, line: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs what a VM runs at boot, on stand-ins for what it changes."""
    for program in ("docker", "systemctl", "apt-get"):
        reads = '[ "$1" != login ] || cat > /dev/null'
        pretended.program(program, f'{reads}; echo {program} "$@" >> "$STANDIN/vm"')
    pretended.program("curl", 'echo \'{"access_token": "secret"}\'')
    (pretended.folder / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    (pretended.folder / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    (pretended.folder / "run").mkdir(exist_ok=True)
    done = run_on_vm(pretended, line, **environment)
    assert done.returncode == 0, done.stderr
    return done


def run_on_vm(pretended: Pretended, line: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", (LAUNCH / "vm_startup.sh").read_text().replace("set -euo", f"{line}\nset -euo", 1)],
        capture_output=True,
        text=True,
        env={**pretended.environment, "BERTJAX_ROOT": str(pretended.folder), **environment},
    )


def test_a_vm_keeps_the_command_alive_but_for_what_would_fail_again(pretended):
    image = "us-docker.pkg.dev/p/bertjax/tpu"
    vm(pretended, f"bertjax_image={image} bertjax_command=(bertjax train --config 'a:b=1,c=$HOME d')")
    did = (pretended.folder / "vm").read_text()
    assert "docker login --username oauth2accesstoken --password-stdin https://us-docker.pkg.dev" in did
    assert f"docker pull --quiet {image}" in did and did.endswith("systemctl restart bertjax\n")
    unit = (pretended.folder / "etc/systemd/system/bertjax.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    assert settings["Restart"] == "on-failure" and settings["RestartPreventExitStatus"] == "1 2"
    assert int(settings["TimeoutStopSec"]) > 180 and "stop -t 180 bertjax" in settings["ExecStop"]
    # A container that is gone when the command has ended is no failure of the unit.
    assert settings["ExecStop"].startswith("-") and settings["StartLimitIntervalSec"] == "0"
    (pretended.folder / "vm").unlink()
    subprocess.run([pretended.folder / "usr/local/bin/bertjax-run"], env=pretended.environment, check=True)
    ran = (pretended.folder / "vm").read_text()
    assert ran.startswith("docker run --rm --name bertjax --privileged --network host")
    assert "--env BERTJAX_STAGING=/scratch" in ran and ran.endswith(f"{image} bertjax train --config a:b=1,c=$HOME d\n")


def test_a_boot_starts_what_was_there_and_a_new_command_replaces_it(pretended):
    vm(pretended, "bertjax_image=i bertjax_command=(first)")
    vm(pretended, "bertjax_image=i bertjax_command=(second)")
    run = pretended.folder / "usr/local/bin/bertjax-run"
    assert "first" in run.read_text()
    vm(pretended, "bertjax_image=i bertjax_command=(second) bertjax_replace=yes")
    assert "second" in run.read_text()


@pytest.mark.parametrize(
    ("started", "active", "status", "says"),
    [
        ("''", "inactive", "0", "setting up"),
        ("0", "inactive", "0", "setting up"),
        ("5", "active", "0", "running"),
        ("5", "activating", "43", "running"),
        ("5", "inactive", "0", "ended 0"),
        ("5", "failed", "1", "ended 1"),
    ],
)
def test_a_vm_says_how_the_command_is(pretended, started, active, status, says):
    vm(pretended, "bertjax_image=i bertjax_command=(true)")
    pretended.program(
        "systemctl",
        f'case "$*" in is-active*) echo {active} ;; *Timestamp*) echo {started} ;; *) echo {status} ;; esac',
    )
    state = pretended.folder / "usr/local/bin/bertjax-state"
    done = subprocess.run([state], capture_output=True, text=True, env=pretended.environment, check=True)
    assert done.stdout == f"bertjax: {says}\n"


def test_a_set_up_that_fails_is_said_and_ends_keep(pretended):
    vm(pretended, "bertjax_image=i bertjax_command=(true)")
    pretended.program("docker", '[ "$1" != pull ]')
    line = "bertjax_image=i bertjax_command=(true) bertjax_replace=yes"
    done = run_on_vm(pretended, line, BERTJAX_PULL_SECONDS="0")
    assert done.returncode == 1 and done.stderr.count("cannot pull i") == 5
    state = pretended.folder / "usr/local/bin/bertjax-state"
    said = subprocess.run([state], capture_output=True, text=True, env=pretended.environment, check=True).stdout
    assert said == "bertjax: set-up failed\n"
    pretended.fail(job=said.removeprefix("bertjax: ").strip())
    done = pretended.run(f"queued_resource.sh keep bert {TPU} -- true")
    assert done.returncode == 1
    told(done, "the command ended with a failed set-up on bert", paid=True)
