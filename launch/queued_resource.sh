#!/usr/bin/env bash
# Requests Cloud TPU VMs as a queued resource. Every VM runs a command in a container and restarts it after failures.
#
#   launch/queued_resource.sh base us-docker.pkg.dev/PROJECT/bertjax/tpu --zone=us-west4-a \
#     --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot -- \
#     bertjax train --distributed --config pretrain:size=base,corpus=gs://BUCKET/corpus --workdir gs://BUCKET/runs/base
#
# usage: launch/queued_resource.sh NAME IMAGE [OPTION]... -- COMMAND
# OPTION is any option of `gcloud compute tpus queued-resources create`. For several slices, use --node-count=N
# --node-prefix=NAME. The script does not request a new TPU after a preemption; launch/skypilot.yaml does.
set -euo pipefail

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit "$1"; }
[[ ${1:-} != --help ]] || usage 0
[[ $# -ge 2 && $1 != -* && $2 != -* ]] || usage 2 >&2
name=$1 image=$2
shift 2
options=()
while (($#)) && [[ $1 != -- ]]; do options+=("$1"); shift; done
(($# > 1)) || usage 2 >&2
shift
[[ " ${options[*]}" == *" --node-count"* ]] || options+=(--node-id="$name")

startup=$(mktemp)
trap 'rm -f "$startup"' EXIT
cat > "$startup" << END
#!/usr/bin/env bash
# Runs as root at every boot.
set -euo pipefail
image=$(printf %q "$image")
command=($(printf '%q ' "$@"))
END
cat >> "$startup" << 'END'
command -v docker || { apt-get -qq update; apt-get -qq install --yes docker.io; }
token=$(curl --silent --fail --header 'Metadata-Flavor: Google' \
  http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["access_token"])')
export HOME=/root
docker login --username oauth2accesstoken --password-stdin "https://${image%%/*}" <<< "$token"
docker pull --quiet "$image"
docker_run=("$(command -v docker)" run --rm --name bertjax --privileged --network host --ulimit memlock=-1
  --volume /var/lib/bertjax:/scratch --env BERTJAX_STAGING=/scratch)
# A command with exit status 1 or 2 would fail again. Saving a checkpoint takes less than 180 s.
systemd-run --unit=bertjax --property=Restart=on-failure --property='RestartPreventExitStatus=1 2' \
  --property=RestartSec=10 --property=StartLimitIntervalSec=0 --property=TimeoutStopSec=180 \
  --property="ExecStartPre=-$(command -v docker) rm --force bertjax" "${docker_run[@]}" "$image" "${command[@]}"
END
gcloud compute tpus queued-resources create "$name" "${options[@]}" \
  --scopes=https://www.googleapis.com/auth/cloud-platform --metadata-from-file=startup-script="$startup"
