#!/usr/bin/env bash
# TPU VMs of v2 to v5e by queued resources of the Cloud TPU API: one command on all workers of one or several slices.
#
#   launch/queued_resource.sh keep bert --zone us-west4-a --type v5litepod-16 --runtime v2-alpha-tpuv5-lite \
#     --image us-docker.pkg.dev/PROJECT/bertjax/tpu --spot -- \
#     bertjax train --distributed --config pretrain:size=base,corpus=gs://BUCKET/corpus --workdir gs://BUCKET/runs/base
#
#   create NAME ... -- COMMAND   ask for the TPU, wait for it; each VM sets itself up and keeps COMMAND running
#   keep NAME ... -- COMMAND     create, unless it stands; watch; create anew after preemption, SUSPENDED; end with COMMAND
#   run NAME --image IMAGE -- COMMAND   another command on VMs that stand
#   status NAME | log NAME [--slice I] [--worker J] | list | delete NAME
#
# --zone ZONE (or $CLOUDSDK_COMPUTE_ZONE), --project PROJECT, --type TYPE, --runtime VERSION, --image IMAGE,
# --slices N (1), --spot or --reserved, --service-account EMAIL, --delete (keep: when COMMAND has ended, delete the TPU),
# --dry-run (print the commands). $LAUNCH_POLL_SECONDS (20) between two looks.
set -euo pipefail
# shellcheck source=launch/vm.sh
source "$(dirname "$0")/vm.sh"

type='' runtime='' slices=1 reserved='' slice=0
with_value=(--zone --project --type --runtime --image --slices --service-account --slice --worker)
switches=(--spot --reserved --delete)
read_arguments "$@"
[[ -n $zone ]] || wrong "$verb needs --zone"
need_name '^[a-z][a-z0-9-]*$' 'lower-case letters, digits and -'
[[ $slices =~ ^[1-9][0-9]*$ ]] || wrong "--slices $slices is not a number of slices"

kind=TPU machines=workers up=ACTIVE dead=(FAILED SUSPENDED)
where=(--zone="$zone" ${project:+--project="$project"})
resources=(gcloud compute tpus queued-resources)
show_it=("${resources[@]}" describe "$name" "${where[@]}")
state_it=("${show_it[@]}" '--format=value(state.state)')
# A request that has nodes is deleted only with --force.
delete_it=("${resources[@]}" delete "$name" "${where[@]}" --force --quiet)
nodes() { if ((slices == 1)); then echo "$name"; else seq -f "$name-%g" 0 $((slices - 1)); fi; }
on_workers() { act "${resources[@]}" ssh "$name" "${where[@]}" --node="$1" --worker="$2" --command="$3" --quiet; }
on_all() { on_workers all all "$1"; }

request() {
  local size=(--node-id="$name")
  ((slices == 1)) || size=(--node-count="$slices" --node-prefix="$name")
  write_startup
  owe
  act "${resources[@]}" create "$name" "${where[@]}" --accelerator-type="$type" --runtime-version="$runtime" \
    "${size[@]}" ${spot:+--spot} ${reserved:+--reserved} ${service_account:+--service-account="$service_account"} \
    "$scopes" "$startup_script" && return
  owe_unless_absent "${state_it[@]}"
  fail "the request for $name was refused, why stands above; its state is $answer"
}

look() { ask_patiently "${state_it[@]}"; state=$answer; }
say_up() { say "$name is ACTIVE; its VMs set themselves up"; }
say_what_delays() { :; }
give_up_deleting() { fail "$name is still $state after $1 looks: it is stuck; try the console, then Google's support"; }
delete() { remove; }

# Names the workers that ssh does not reach.
unreached() {
  local node index missing=()
  for node in $(nodes); do
    ask gcloud compute tpus tpu-vm describe "$node" "${where[@]}" '--format=value(networkEndpoints.len())' || answer=0
    for ((index = 0; index < ${answer/ABSENT/0}; index++)); do
      gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" --worker="$index" --command=true --quiet < /dev/null &> /dev/null ||
        missing+=("$node worker $index,")
    done
  done
  local all="${missing[*]:-none, when asked one by one,}"
  echo "${all%,}"
}

preempted() {
  local node
  for node in $(nodes); do
    ask gcloud compute tpus tpu-vm describe "$node" "${where[@]}" '--format=value(state)' || return 1
    [[ $answer != @(PREEMPTED|TERMINATED|STOPPED|ABSENT) ]] || { say "$node is $answer"; return 0; }
  done
  return 1
}

# A lost TPU does not always say so: one that was reached and is not any more counts as lost, after a while.
is_lost() {
  if one_of "$state" "${dead[@]}"; then
    lost "$name is $state, and would stay so"
    ask "${show_it[@]}" '--format=value(state.failedData.error.message)' && [[ -n $answer ]] && say "why: $answer"
    failed=$((failed + 1))
  elif [[ $state == "$up" ]] && { preempted || gone_silent; }; then
    lost "$name is lost"
  else
    return 1
  fi
}

case $verb in
  create | keep)
    need_image
    need_command
    [[ -n $type && -n $runtime ]] || wrong "$verb needs --type and --runtime, as v5litepod-16 and v2-alpha-tpuv5-lite"
    if [[ $verb == keep ]]; then
      keep
    else
      request
      wait_until_up || fail "$name will not be allocated"
    fi ;;
  run) need_image; need_command; run_command ;;
  status)
    act "${state_it[@]}"
    on_all "$state_command" || fail "no ssh to $(unreached)" ;;
  log) on_workers "$slice" "$worker" "$log_command" ;;
  list) act "${resources[@]}" list "${where[@]}" ;;
  delete) delete ;;
  *) wrong "unknown verb $verb" ;;
esac
