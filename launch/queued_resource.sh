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
program=queued_resource.sh
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"
# shellcheck source=launch/vm.sh
source "$(dirname "$0")/vm.sh"

verb=${1:---help}
[[ $verb != --help && $verb != -h ]] || usage
shift
name='' type='' runtime='' slices=1 options=() delete_after='' slice=0 worker=0
[[ ${1:--} == -* ]] || { name=$1; shift; }
while (($#)); do
  case $1 in
    --zone) zone=$(value_of "$@"); shift ;;
    --project) project=$(value_of "$@"); shift ;;
    --type) type=$(value_of "$@"); shift ;;
    --runtime) runtime=$(value_of "$@"); shift ;;
    --image) image=$(value_of "$@"); shift ;;
    --slices) slices=$(value_of "$@"); shift ;;
    --service-account) options+=(--service-account="$(value_of "$@")"); shift ;;
    --slice) slice=$(value_of "$@"); shift ;;
    --worker) worker=$(value_of "$@"); shift ;;
    --spot | --reserved) options+=("$1") ;;
    --delete) delete_after=yes ;;
    --dry-run) dry_run=yes ;;
    --help | -h) usage ;;
    --) shift; command=("$@"); break ;;
    *) wrong "unknown argument $1" ;;
  esac
  shift
done
[[ -n $zone ]] || wrong "$verb needs --zone"
[[ $verb == list || $name =~ ^[a-z][a-z0-9-]*$ ]] || wrong "$verb needs a NAME of lower-case letters, digits and -"
[[ $slices =~ ^[1-9][0-9]*$ ]] || wrong "--slices $slices is not a number of slices"

where=(--zone="$zone" ${project:+--project="$project"})
resources=(gcloud compute tpus queued-resources)
describe=("${resources[@]}" describe "$name" "${where[@]}")
# A request that has nodes is deleted only with --force.
delete_it=("${resources[@]}" delete "$name" "${where[@]}" --force --quiet)
owe() { paid="TPU $name" delete_with=$(quoted "${delete_it[@]}"); }
nodes() { if ((slices == 1)); then echo "$name"; else seq -f "$name-%g" 0 $((slices - 1)); fi; }
on_workers() { act "${resources[@]}" ssh "$name" "${where[@]}" --node="$1" --worker="$2" --command="$3" --quiet; }

request() {
  local size=(--node-id="$name")
  ((slices == 1)) || size=(--node-count="$slices" --node-prefix="$name")
  write_startup
  owe
  act "${resources[@]}" create "$name" "${where[@]}" --accelerator-type="$type" --runtime-version="$runtime" \
    "${size[@]}" "${options[@]}" --scopes=https://www.googleapis.com/auth/cloud-platform \
    --metadata-from-file=startup-script="$scratch/startup" && return
  ask "${describe[@]}" '--format=value(state.state)' || answer=unknown
  [[ $answer != ABSENT ]] || paid=''
  fail "the request for $name was refused, why stands above; its state is $answer"
}

# Sets `answer` to the state of the request.
look() { ask_patiently "${describe[@]}" '--format=value(state.state)'; }

wait_until_active() {
  local told=''
  if [[ -n $dry_run ]]; then echo "$(quoted "${describe[@]}")  # until ACTIVE"; return; fi
  while look; [[ $answer != ACTIVE ]]; do
    [[ $answer == "$told" ]] || say "$name is $answer"
    told=$answer
    [[ $answer != @(FAILED|SUSPENDED|ABSENT) ]] || return 1
    pause
  done
  say "$name is ACTIVE; its VMs set themselves up"
}

delete() {
  local looks=0
  act "${delete_it[@]}" || say "deleting $name was refused; looking on"
  [[ -z $dry_run ]] || return 0
  owe
  while look; [[ $answer != ABSENT ]]; do
    looks=$((looks + 1))
    ((looks < patience * 4)) ||
      fail "$name is still $answer after $looks looks: it is stuck; try the console, then Google's support"
    ((looks % patience)) || "${delete_it[@]}" || true
    pause
  done
  paid=''
  say "$name is deleted"
}

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

run_command() {
  local attempt
  for attempt in 1 2 3; do
    on_workers all all "sudo bash -c $(quoted "$(startup bertjax_replace=yes)")" && return
    ((attempt == 3)) || { say "not all workers took the command; once more"; pause; }
  done
  owe
  fail "the command did not reach $(unreached); the other workers have it and wait"
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
keep() {
  local failed=0 out_of_reach=0 reached='' told
  while true; do
    look
    case $answer in
      ABSENT)
        ((failed < 3)) || fail "$name failed $failed times without having run"
        request
        out_of_reach=0 reached=''
        wait_until_active || true ;;
      FAILED | SUSPENDED)
        say "$name is $answer, and would stay so; it is deleted and asked for anew"
        ask "${describe[@]}" '--format=value(state.failedData.error.message)' && [[ -n $answer ]] && say "why: $answer"
        failed=$((failed + 1))
        delete ;;
      ACTIVE)
        owe
        told=$(on_workers all all "$state_command" < /dev/null 2> "$scratch/ssh") || told=''
        job_of "$told"
        if [[ $job == running ]]; then
          failed=0 out_of_reach=0 reached=yes
          pause
        elif [[ $job != unreached ]]; then
          end_of_job
          return
        elif out_of_reach=$((out_of_reach + 1)); preempted || { [[ -n $reached ]] && ((out_of_reach >= patience)); }; then
          say "$name is lost; it is deleted and asked for anew"
          delete
        elif ((out_of_reach >= patience)); then
          sed "s/^/$program: /" "$scratch/ssh" >&2
          fail "no ssh, $out_of_reach times in a row, to $(unreached)"
        else
          pause
        fi ;;
      *) owe; wait_until_active || true ;;
    esac
  done
}

case $verb in
  create | keep)
    need_command
    [[ -n $type && -n $runtime ]] || wrong "$verb needs --type and --runtime, as v5litepod-16 and v2-alpha-tpuv5-lite"
    if [[ $verb == keep && -z $dry_run ]]; then
      keep
    else
      request
      wait_until_active || fail "$name will not be allocated"
      [[ $verb == create ]] || { on_workers all all "$state_command"; echo "# when it is lost:"; delete; }
    fi ;;
  run) need_command; run_command ;;
  status)
    act "${describe[@]}" '--format=value(state.state)'
    on_workers all all "$state_command" || fail "no ssh to $(unreached)" ;;
  log) on_workers "$slice" "$worker" "$log_command" ;;
  list) act "${resources[@]}" list "${where[@]}" ;;
  delete) delete ;;
  *) wrong "unknown verb $verb" ;;
esac
