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
# shellcheck source=launch/vm.sh
source "$(dirname "$0")/vm.sh"

project=${CLOUDSDK_CORE_PROJECT:-} machine_type='' topology='' os_image_family=''
with_value=(--zone --project --machine-type --topology --image --os-image-family --service-account --worker)
switches=(--spot --delete)
read_arguments "$@"
[[ -n $zone && -n $project ]] || wrong "$verb needs --project and --zone"
need_name '^[a-z][a-z0-9-]*$' 'lower-case letters, digits and -'

kind='instance group' machines=VMs up='all RUNNING' dead=(LOST) state=ABSENT
region=${zone%-*}
at_zone=(--zone="$zone" --project="$project") at_region=(--region="$region" --project="$project")
groups=(gcloud compute instance-groups managed)
show_it=("${groups[@]}" list-instances "$name" "${at_zone[@]}")
delete_it=("${groups[@]}" delete "$name" "${at_zone[@]}" --quiet)

# The template and the policy cost nothing, and stay until `delete`.
make_template() {
  local options=(${service_account:+--service-account="$service_account"})
  # Spot VMs of a slice come back only with a new group: stopping or deleting them makes no difference here.
  [[ -z $spot ]] || options+=(--provisioning-model=SPOT --instance-termination-action=STOP)
  write_startup
  act gcloud compute instance-templates create "$name" --project="$project" --instance-template-region="$region" \
    --machine-type="$machine_type" --maintenance-policy=TERMINATE --image-project=ubuntu-os-accelerator-images \
    --image-family="$os_image_family" --boot-disk-size=200GB "$scopes" "${options[@]}" "$startup_script"
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
  owe_unless_absent "${groups[@]}" describe "$name" "${at_zone[@]}" '--format=value(name)'
  fail "the group $name was refused, why stands above"
}

# Sets `state` to ABSENT, WAITING, LOST or $up, and `instances` to the names of its VMs.
look() {
  local instance status
  ask_patiently "${show_it[@]}" '--format=value(instance.basename(),instanceStatus)'
  instances=()
  if [[ $answer == ABSENT ]]; then state=ABSENT; return; fi
  state=$up
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
look_unless_dry() { [[ -n $dry_run ]] || look; }

say_up() { say "all ${#instances[@]} VMs of $name are RUNNING; they set themselves up"; }
say_what_delays() {
  ask "${groups[@]}" list-errors "$name" "${at_zone[@]}" --limit=1 '--format=value(error.message)' || answer=''
  [[ -z $answer ]] || say "$name: $answer"
  [[ $answer != *[Qq]uota* ]] ||
    fail "the quota does not allow $name; ask for more at console.cloud.google.com/iam-admin/quotas"
}
give_up_deleting() { fail "$name still has ${#instances[@]} VMs after $1 looks: it is stuck; try the console"; }

delete() {
  remove
  act gcloud compute instance-templates delete "$name" "${at_region[@]}" --quiet || true
  act gcloud compute resource-policies delete "$name" "${at_region[@]}" --quiet || true
}

# Sets `missing` to the VMs that were not reached, and `ssh_errors` to the file with what ssh to the first of them said.
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
  ((${#missing[@]} == 0)) || { ssh_errors=$scratch/${missing[0]}.errors; return 1; }
}
unreached() { echo "${missing[*]}"; }

# A slice that was reached does not wait for hosts again: they are gone.
is_lost() {
  if [[ $state == LOST || ($state == WAITING && -n $reached) ]]; then
    lost "$name is lost"
  elif gone_silent; then
    lost "$(unreached) of $name cannot be reached any more"
  else
    return 1
  fi
}

case $verb in
  create | keep)
    need_image
    need_command
    [[ $machine_type =~ -([1248])t$ ]] || wrong "$verb needs --machine-type, as ct6e-standard-4t"
    chips_of_host=${BASH_REMATCH[1]}
    need_topology
    count_hosts "$chips_of_host"
    [[ -n $os_image_family ]] || case $machine_type in
      tpu7x*) os_image_family=ubuntu-accel-2404-amd64-tpu-tpu7x ;;
      *) os_image_family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e ;;
    esac
    # A group that stands has its template and policy.
    [[ $verb == create ]] || look_unless_dry
    [[ $state != ABSENT ]] || prepare
    if [[ $verb == keep ]]; then
      keep
    else
      request
      wait_until_up || fail "$name will not run"
    fi ;;
  run) need_image; need_command; look_unless_dry; run_command ;;
  status)
    act "${show_it[@]}"
    look_unless_dry
    on_all "$state_command" || fail "no ssh to $(unreached)" ;;
  log)
    look_unless_dry
    [[ -n $dry_run || -n ${instances[worker]:-} ]] || fail "$name has no worker $worker"
    act gcloud compute ssh "${instances[worker]:-$name-VM}" "${at_zone[@]}" --command="$log_command" --quiet ;;
  list) act "${groups[@]}" list --project="$project" --zones="$zone" ;;
  delete) delete ;;
  *) wrong "unknown verb $verb" ;;
esac
