#!/usr/bin/env bash
# TPU slices on GKE: one command on all hosts of one or several slices, as a JobSet that restarts it.
#
#   launch/gke.sh create bert --accelerator tpu-v5-lite-podslice --topology 4x4 \
#     --image us-docker.pkg.dev/PROJECT/bertjax/tpu -- \
#     bertjax train --distributed --config pretrain:size=base,corpus=gs://BUCKET/corpus --workdir gs://BUCKET/runs/base
#
#   create NAME ... -- COMMAND   apply launch/gke/jobset.yaml with what is given here
#   status NAME | log NAME [--slice I] [--worker J] | list | delete NAME
#
# --accelerator LABEL and --topology 4x4 as of the node pools, --chips N of a host (4), --image IMAGE, --slices N (1),
# --queue QUEUE (a LocalQueue of Kueue; none by default), --max-restarts N (20; preemptions are not counted),
# --namespace NAMESPACE (default), --service-account NAME (bertjax), --dry-run (print manifest and commands).
# `log` follows through restarts; $LAUNCH_POLL_SECONDS (20) between two looks.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2034  # `manifest` uses them by their names.
accelerator='' topology='' chips=4 slices=1 queue='' max_restarts=20 namespace=default service_account=bertjax
slice=0 worker=0
with_value=(--accelerator --topology --chips --image --slices --queue --max-restarts --namespace --service-account)
with_value+=(--slice --worker)
read_arguments "$@"
need_name '^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$' 'at most 40 lower-case letters, digits and -'
for number in "$chips" "$slices" "$max_restarts" "$slice" "$worker"; do
  [[ $number =~ ^(0|[1-9][0-9]*)$ ]] || wrong "$number is not a number"
done

for word in "$namespace" "$service_account" "${queue:-none}" "${accelerator:-none}"; do
  [[ $word =~ ^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$ ]] || wrong "$(quoted "$word") is no name of Kubernetes"
done

kubectl=(kubectl --namespace="$namespace")

# A string as YAML takes it, whatever is in it.
in_yaml() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  [[ $text != *[[:cntrl:]]* ]] || wrong "a control character in: $(quoted "$1")"
  printf '"%s"' "$text"
}

manifest() {
  local text words='' word variable
  text=$(< "$(dirname "$0")/gke/jobset.yaml")
  [[ -n $queue ]] || text=$(grep -v 'kueue.x-k8s.io/queue-name' <<< "$text")
  for word in "${command[@]}"; do words+="${words:+, }$(in_yaml "$word")"; done
  image=$(in_yaml "$image")
  for variable in name namespace service_account queue max_restarts slices hosts chips accelerator topology image; do
    text=${text//"\${${variable^^}}"/"${!variable}"}
  done
  # The command last: what is in it is not filled in.
  sed '/^#/d' <<< "${text//"\${COMMAND}"/"[$words]"}"
}

# Sets `answer` to Completed, Failed or nothing, or to ABSENT.
look() { ask_patiently "${kubectl[@]}" get jobset "$name" '--output=jsonpath={.status.terminalState}'; }

status() {
  act "${kubectl[@]}" get jobset "$name" --output=wide
  act "${kubectl[@]}" get pods --selector="jobset.sigs.k8s.io/jobset-name=$name" --output=wide
  act "${kubectl[@]}" get events --field-selector="involvedObject.name=$name"
}

follow() {
  local since=(--tail=-1) pod="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=$slice"
  pod+=",batch.kubernetes.io/job-completion-index=$worker"
  while [[ -n $dry_run ]] || look; [[ -z ${answer:-} ]]; do
    # After a restart the pod is another one; what was printed is not printed again.
    act "${kubectl[@]}" logs --follow --container=bertjax --selector="$pod" "${since[@]}" ||
      say "no log yet; looking again"
    [[ -z $dry_run ]] || return 0
    since=(--since-time="$(date -u +%Y-%m-%dT%H:%M:%SZ)")
    pause
  done
  [[ $answer != ABSENT ]] || fail "there is no JobSet $name in namespace $namespace; see launch/$program list"
  [[ $answer == Completed ]] || fail "the JobSet $name is $answer; see launch/$program status $name"
  say "the JobSet $name is $answer"
}

case $verb in
  create)
    [[ -n $accelerator ]] || wrong "create needs --accelerator, as tpu-v5-lite-podslice"
    need_topology
    need_image
    need_command
    ((chips > 0 && slices > 0)) || wrong "--chips and --slices are at least 1"
    count_hosts "$chips"
    manifest > "$scratch/jobset.yaml"
    [[ -z $dry_run ]] || { echo '# jobset.yaml:'; cat "$scratch/jobset.yaml"; }
    act "${kubectl[@]}" apply --filename="$scratch/jobset.yaml" || {
      paid="JobSet $name" delete_with="launch/$program delete $name --namespace $namespace"
      owe_unless_absent "${kubectl[@]}" get jobset "$name" --output=name
      fail "the JobSet $name was refused, why stands above; an existing one is not changed but deleted and created anew"
    }
    [[ -n $dry_run ]] || say "$name: $slices slices of $hosts hosts; follow it: launch/$program log $name" ;;
  status) status ;;
  log) follow ;;
  list) act kubectl get jobsets --all-namespaces --selector=app.kubernetes.io/name=bertjax ;;
  delete)
    paid="JobSet $name" delete_with=$(quoted "${kubectl[@]}" delete jobset "$name")
    # Pods have 180 seconds to save.
    act "${kubectl[@]}" delete jobset "$name" --ignore-not-found --timeout=300s ||
      fail "$name is not gone; what holds it: $(quoted "${kubectl[@]}" get jobset "$name" --output=yaml)"
    paid=''
    [[ -n $dry_run ]] || say "$name is deleted; its node pools are paid for until they are, too" ;;
  *) wrong "unknown verb $verb" ;;
esac
