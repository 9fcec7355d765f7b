#!/usr/bin/env bash
# TPU VMs of v5p, v6e and newer by a managed instance group of Compute Engine: one command on all hosts of one slice.
#
#   launch/instance_group.sh keep bert --project PROJECT --zone us-east5-a --machine-type ct6e-standard-4t \
#     --topology 4x4 --image us-docker.pkg.dev/PROJECT/bertjax/tpu --spot -- \
#     bertjax train --distributed --config pretrain:size=base,corpus=gs://BUCKET/corpus --workdir gs://BUCKET/runs/base
#
#   create NAME ... -- COMMAND   ask for the slice, wait for it; each VM sets itself up and keeps COMMAND running
#   keep NAME ... -- COMMAND     create, unless it stands; watch; create anew after preemption; end with COMMAND
#   run NAME --image IMAGE -- COMMAND   another command on VMs that stand
#   status NAME | log NAME [--worker J] | list | delete NAME
#
# --project PROJECT, --zone ZONE (or $CLOUDSDK_CORE_PROJECT, $CLOUDSDK_COMPUTE_ZONE), --machine-type TYPE,
# --topology 4x4, --image IMAGE, --os-image-family FAMILY, --spot, --service-account EMAIL, --delete (keep: when COMMAND
# has ended, delete all), --dry-run (print the commands). $LAUNCH_POLL_SECONDS (20) between two looks. Needs a gcloud
# that knows --target-size-policy-mode: gcloud components update.
set -euo pipefail
program=instance_group.sh
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"
# shellcheck source=launch/vm.sh
source "$(dirname "$0")/vm.sh"

verb=${1:---help}
[[ $verb != --help && $verb != -h ]] || usage
shift
name='' machine='' topology='' family='' options=() delete_after='' worker=0
project=${CLOUDSDK_CORE_PROJECT:-}
[[ ${1:--} == -* ]] || { name=$1; shift; }
while (($#)); do
  case $1 in
    --zone) zone=$(value_of "$@"); shift ;;
    --project) project=$(value_of "$@"); shift ;;
    --machine-type) machine=$(value_of "$@"); shift ;;
    --topology) topology=$(value_of "$@"); shift ;;
    --image) image=$(value_of "$@"); shift ;;
    --os-image-family) family=$(value_of "$@"); shift ;;
    --service-account) options+=(--service-account="$(value_of "$@")"); shift ;;
    --worker) worker=$(value_of "$@"); shift ;;
    # Spot VMs of a slice come back only with a new group: stopping or deleting them makes no difference here.
    --spot) options+=(--provisioning-model=SPOT --instance-termination-action=STOP) ;;
    --delete) delete_after=yes ;;
    --dry-run) dry_run=yes ;;
    --help | -h) usage ;;
    --) shift; command=("$@"); break ;;
    *) wrong "unknown argument $1" ;;
  esac
  shift
done
[[ -n $zone && -n $project ]] || wrong "$verb needs --project and --zone"
[[ $verb == list || $name =~ ^[a-z][a-z0-9-]*$ ]] || wrong "$verb needs a NAME of lower-case letters, digits and -"

region=${zone%-*}
at_zone=(--zone="$zone" --project="$project") at_region=(--region="$region" --project="$project")
groups=(gcloud compute instance-groups managed)
list=("${groups[@]}" list-instances "$name" "${at_zone[@]}")
delete_it=("${groups[@]}" delete "$name" "${at_zone[@]}" --quiet)
owe() { paid="instance group $name" delete_with=$(quoted "${delete_it[@]}"); }

# The template and the policy cost nothing, and stay until `delete`.
make_template() {
  write_startup
  act gcloud compute instance-templates create "$name" --project="$project" --instance-template-region="$region" \
    --machine-type="$machine" --maintenance-policy=TERMINATE --image-project=ubuntu-os-accelerator-images \
    --image-family="$family" --boot-disk-size=200GB --scopes=https://www.googleapis.com/auth/cloud-platform \
    "${options[@]}" --metadata-from-file=startup-script="$scratch/startup"
}
make_policy() {
  act gcloud compute resource-policies create workload-policy "$name" "${at_region[@]}" --type=HIGH_THROUGHPUT \
    --accelerator-topology="$topology" --accelerator-topology-mode=AUTO_CONNECT
}

prepare() {
  local way_out="nothing that is paid for exists; an old one goes with: launch/$program delete $name"
  make_template || fail "the template $name was refused, why stands above; $way_out"
  ((hosts == 1)) || make_policy || fail "the policy $name was refused, why stands above; $way_out"
}

# The hosts of a slice are created all at once, or waited for; a repaired VM would not be part of the slice.
request() {
  local slice=()
  ((hosts == 1)) || slice=(--target-size-policy-mode=bulk --default-action-on-vm-failure=do-nothing
    --workload-policy="projects/$project/regions/$region/resourcePolicies/$name")
  owe
  act "${groups[@]}" create "$name" "${at_zone[@]}" --size="$hosts" "${slice[@]}" \
    --template="projects/$project/regions/$region/instanceTemplates/$name" && return
  ask "${groups[@]}" describe "$name" "${at_zone[@]}" '--format=value(name)' || answer=unknown
  [[ $answer != ABSENT ]] || paid=''
  fail "the group $name was refused, why stands above"
}

# Sets `state` to ABSENT, WAITING, RUNNING or LOST, and `instances` to the names of its VMs.
look() {
  local status
  ask_patiently "${list[@]}" '--format=value(instance.basename(),instanceStatus)'
  instances=()
  if [[ $answer == ABSENT ]]; then state=ABSENT; return; fi
  state=RUNNING
  while read -r instance status; do
    [[ -n $instance ]] || continue
    instances+=("$instance")
    case $status in
      RUNNING) ;;
      STOPPING | STOPPED | TERMINATED | SUSPENDING | SUSPENDED) state=LOST ;;
      *) [[ $state == LOST ]] || state=WAITING ;;
    esac
  done <<< "$answer"
  [[ $state == LOST ]] || ((${#instances[@]} >= ${hosts:-1})) || state=WAITING
}

wait_until_running() {
  local told='' looks=0
  if [[ -n $dry_run ]]; then echo "$(quoted "${list[@]}")  # until all RUNNING"; return; fi
  while look; [[ $state != RUNNING ]]; do
    [[ $state == "$told" ]] || say "$name is $state"
    told=$state
    [[ $state == WAITING ]] || return 1
    looks=$((looks + 1))
    if ((looks % patience == 1)); then
      ask "${groups[@]}" list-errors "$name" "${at_zone[@]}" --limit=1 '--format=value(error.message)' || answer=''
      [[ -z $answer ]] || say "$name: $answer"
      [[ $answer != *[Qq]uota* ]] ||
        fail "the quota does not allow $name; ask for more at console.cloud.google.com/iam-admin/quotas"
    fi
    pause
  done
  say "all ${#instances[@]} VMs of $name are RUNNING; they set themselves up"
}

delete_group() {
  local looks=0
  act "${delete_it[@]}" || say "deleting $name was refused; looking on"
  [[ -z $dry_run ]] || return 0
  owe
  while look; [[ $state != ABSENT ]]; do
    looks=$((looks + 1))
    ((looks < patience * 4)) ||
      fail "$name still has ${#instances[@]} VMs after $looks looks: it is stuck; try the console"
    ((looks % patience)) || "${delete_it[@]}" || true
    pause
  done
  paid=''
  say "$name is deleted"
}

delete() {
  delete_group
  act gcloud compute instance-templates delete "$name" "${at_region[@]}" --quiet || true
  act gcloud compute resource-policies delete "$name" "${at_region[@]}" --quiet || true
}

# Runs a command on all VMs at once, and prints what they say; sets `missing` to those it did not reach.
on_all() {
  local instance
  missing=()
  if [[ -n $dry_run ]]; then act gcloud compute ssh "$name-VM" "${at_zone[@]}" --command="$1" --quiet; return; fi
  for instance in "${instances[@]}"; do
    {
      gcloud compute ssh "$instance" "${at_zone[@]}" --command="$1" --quiet < /dev/null \
        > "$scratch/$instance" 2> "$scratch/$instance.errors" && touch "$scratch/$instance.reached"
    } &
  done
  wait
  for instance in "${instances[@]}"; do
    if [[ -e $scratch/$instance.reached ]]; then cat "$scratch/$instance"; else missing+=("$instance"); fi
    rm -f "$scratch/$instance.reached"
  done
  ((${#missing[@]} == 0))
}

run_command() {
  local attempt
  [[ -n $dry_run ]] || look
  for attempt in 1 2 3; do
    on_all "sudo bash -c $(quoted "$(startup bertjax_replace=yes)")" && return
    ((attempt == 3)) || { say "not all VMs took the command; once more"; pause; }
  done
  owe
  fail "the command did not reach ${missing[*]}; the other VMs have it and wait"
}

keep() {
  local out_of_reach=0 reached=''
  look
  [[ $state != ABSENT ]] || prepare
  while true; do
    look
    case $state in
      ABSENT) request; out_of_reach=0 reached=''; wait_until_running || true ;;
      WAITING | LOST)
        owe
        if [[ $state == WAITING && -z $reached ]]; then
          wait_until_running || true
        else
          say "$name is lost; it is deleted and asked for anew"
          delete_group
        fi ;;
      RUNNING)
        owe
        if on_all "$state_command" > "$scratch/told"; then job_of "$(cat "$scratch/told")"; else job=unreached; fi
        if [[ $job == running ]]; then
          out_of_reach=0 reached=yes
          pause
        elif [[ $job != unreached ]]; then
          end_of_job
          return
        elif out_of_reach=$((out_of_reach + 1)); ((out_of_reach < patience)); then
          pause
        elif [[ -n $reached ]]; then
          say "${missing[*]} of $name cannot be reached any more; it is deleted and asked for anew"
          delete_group
        else
          sed "s/^/$program: /" "$scratch/${missing[0]}.errors" >&2
          fail "no ssh, $out_of_reach times in a row, to ${missing[*]}"
        fi ;;
    esac
  done
}

case $verb in
  create | keep)
    need_command
    [[ $machine =~ -([1248])t$ ]] || wrong "$verb needs --machine-type, as ct6e-standard-4t"
    chips_of_host=${BASH_REMATCH[1]}
    [[ $topology =~ ^[0-9]+x[0-9]+(x[0-9]+)?$ ]] || wrong "$verb needs --topology, as 4x4 or 4x4x8"
    chips=$((${topology//x/*}))
    ((chips % chips_of_host == 0)) || wrong "$topology is $chips chips, which hosts of $chips_of_host do not make up"
    hosts=$((chips / chips_of_host))
    [[ -n $family ]] || case $machine in
      tpu7x*) family=ubuntu-accel-2404-amd64-tpu-tpu7x ;;
      *) family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e ;;
    esac
    if [[ $verb == keep && -z $dry_run ]]; then
      keep
    else
      prepare
      request
      wait_until_running || fail "$name will not run"
      [[ $verb == create ]] || { on_all "$state_command"; echo "# when it is lost:"; delete_group; }
    fi ;;
  run) need_command; run_command ;;
  status)
    act "${list[@]}"
    [[ -n $dry_run ]] || look
    on_all "$state_command" || fail "no ssh to ${missing[*]}" ;;
  log)
    [[ -n $dry_run ]] || { look; [[ -n ${instances[worker]:-} ]] || fail "$name has no worker $worker"; }
    act gcloud compute ssh "${instances[worker]:-$name-VM}" "${at_zone[@]}" --command="$log_command" --quiet ;;
  list) act "${groups[@]}" list --project="$project" --zones="$zone" ;;
  delete) delete ;;
  *) wrong "unknown verb $verb" ;;
esac
