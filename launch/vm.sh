# shellcheck shell=bash
# What queued_resource.sh and instance_group.sh share; read by them, not run. Names are set here and used there:
# shellcheck disable=SC2034,SC2154

# The states in which bertjax-state of vm_startup.sh says that a VM is.
state_command="bertjax-state 2> /dev/null || echo 'bertjax: setting up'"
log_command='sudo journalctl --unit=bertjax --unit=google-startup-scripts --output=cat --lines=100 --follow'

need_command() {
  [[ -n $image ]] || wrong "$verb needs --image"
  ((${#command[@]})) || wrong "$verb needs -- COMMAND"
}

# What a VM runs as root: vm_startup.sh with the image and the command before it.
startup() {
  echo '#!/usr/bin/env bash'
  echo "bertjax_image=$(quoted "$image") bertjax_command=($(quoted "${command[@]}")) ${1:-}"
  tail -n +2 "$(dirname "${BASH_SOURCE[0]}")/vm_startup.sh"
}

# Writes it to `$scratch/startup`; with --dry-run, says what would be there.
write_startup() {
  startup > "$scratch/startup"
  [[ -z $dry_run ]] || echo "# startup: launch/vm_startup.sh after the line $(sed -n 2p "$scratch/startup")"
}

# Sets `job`, from what the workers say, to running, unreached, or what the command ended with. One worker that failed for
# good is a failure of all.
job_of() {
  local ended
  ended=$(sed -n 's/.*bertjax: ended \([0-9]*\)$/\1/p' <<< "$1")
  if grep -q 'bertjax: set-up failed' <<< "$1"; then
    job='a failed set-up'
  elif grep -qx '[12]' <<< "$ended"; then
    job=$(grep -x '[12]' <<< "$ended" | head -n 1)
  elif grep -qE 'bertjax: (running|setting up)' <<< "$1"; then
    job=running
  else
    job=$(sort -n <<< "$ended" | tail -n 1)
    job=${job:-unreached}
  fi
}

# Called by `keep` when the command has ended with $job.
end_of_job() {
  [[ -z $delete_after ]] || delete
  [[ $job == 0 ]] || fail "the command ended with $job on $name; see: launch/$program log $name --zone $zone"
  say "the command is finished"
}
