# shellcheck shell=bash
# What queued_resource.sh and instance_group.sh share; read by them, not run. Names are set here and used there:
# shellcheck disable=SC2034,SC2154
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Each of the two says what it asks for, and how:
#   kind, machines            what it is called, and what it consists of
#   show_it, delete_it        the commands that show and delete it
#   look                      sets `state` to ABSENT, $up (ssh can be tried), one of ${dead[@]} (it stays so) or another
#   request                   asks for it; fails where that is refused
#   say_up, say_what_delays   says that it is up; while it is not, why, if that is known
#   on_all COMMAND            runs it on all machines and prints what they say; 1 where not all were reached
#   unreached                 names those that were not
#   is_lost                   whether it is to be deleted and asked for anew, by what `keep` knows; says so, by `lost`
#   give_up_deleting LOOKS    fails, and says what is left
#   delete                    deletes it, by `remove`, and what stands beside it
project='' zone="${CLOUDSDK_COMPUTE_ZONE:-}" spot='' delete='' service_account='' worker=0

# The states in which bertjax-state of vm_startup.sh says that a VM is.
state_command="bertjax-state 2> /dev/null || echo 'bertjax: setting up'"
log_command='sudo journalctl --unit=bertjax --unit=google-startup-scripts --output=cat --lines=100 --follow'
scopes=--scopes=https://www.googleapis.com/auth/cloud-platform
startup_script=--metadata-from-file=startup-script=$scratch/startup
ssh_errors=$scratch/ssh

# What a VM runs as root: vm_startup.sh with the image and the command before it.
startup() {
  echo '#!/usr/bin/env bash'
  echo "bertjax_image=$(quoted "$image") bertjax_command=($(quoted "${command[@]}")) ${1:-}"
  tail -n +2 "$(dirname "${BASH_SOURCE[0]}")/vm_startup.sh"
}

# Writes it to where `startup_script` says; with --dry-run, says what is in it.
write_startup() {
  startup > "$scratch/startup"
  [[ -z $dry_run ]] || echo "# startup: launch/vm_startup.sh after the line $(sed -n 2p "$scratch/startup")"
}

owe() { paid="$kind $name" delete_with=$(quoted "${delete_it[@]}"); }

# Waits for it; 1 where it will not be up.
wait_until_up() {
  local told='' looks=0
  if [[ -n $dry_run ]]; then echo "$(quoted "${show_it[@]}")  # until $up"; return; fi
  while look; [[ $state != "$up" ]]; do
    [[ $state == "$told" ]] || say "$name is $state"
    told=$state
    ! one_of "$state" ABSENT "${dead[@]}" || return 1
    looks=$((looks + 1))
    ((looks % patience != 1)) || say_what_delays
    pause
  done
  say_up
}

# Deletes what is paid for, and waits until it is gone; asks for that again now and then.
remove() {
  local looks=0
  act "${delete_it[@]}" || say "deleting $name was refused; looking on"
  [[ -z $dry_run ]] || return 0
  owe
  while look; [[ $state != ABSENT ]]; do
    looks=$((looks + 1))
    ((looks < patience * 4)) || give_up_deleting "$looks"
    ((looks % patience)) || "${delete_it[@]}" || true
    pause
  done
  paid=''
  say "$name is deleted"
}

run_command() {
  local attempt
  for attempt in 1 2 3; do
    on_all "sudo bash -c $(quoted "$(startup bertjax_replace=yes)")" && return
    ((attempt == 3)) || { say "not all $machines took the command; once more"; pause; }
  done
  owe
  fail "the command did not reach $(unreached); the other $machines have it and wait"
}

# Sets `job` to how the command is: running, unreached, or what it ended with. One worker that failed for good is a
# failure of all.
look_at_job() {
  local ended
  on_all "$state_command" < /dev/null > "$scratch/told" 2> "$scratch/ssh" || { job=unreached; return; }
  ended=$(sed -n 's/.*bertjax: ended \([0-9]*\)$/\1/p' "$scratch/told")
  if grep -q 'bertjax: set-up failed' "$scratch/told"; then
    job='a failed set-up'
  elif grep -qx '[12]' <<< "$ended"; then
    job=$(grep -x '[12]' <<< "$ended" | head -n 1)
  elif grep -qE 'bertjax: (running|setting up)' "$scratch/told"; then
    job=running
  else
    job=$(sort -n <<< "$ended" | tail -n 1)
    job=${job:-unreached}
  fi
}

lost() { say "$1; it is deleted and asked for anew"; }
gone_silent() { [[ -n $reached ]] && ((out_of_reach >= patience)); }

# Asks for what is not there, watches it, and asks for it anew when it is lost, until the command has ended. `reached`
# says whether the command ran since, `out_of_reach` and `failed` how often in a row ssh and the request have failed.
keep() {
  if [[ -n $dry_run ]]; then
    request
    wait_until_up
    on_all "$state_command"
    echo "# when it is lost:"
    remove
    return
  fi
  failed=0 out_of_reach=0 reached=''
  while true; do
    look
    case $state in
      ABSENT)
        ((failed < 3)) || fail "$name failed $failed times without having run"
        request
        out_of_reach=0 reached=''
        wait_until_up || true ;;
      "$up")
        owe
        look_at_job
        case $job in
          running)
            failed=0 out_of_reach=0 reached=yes
            pause ;;
          unreached)
            out_of_reach=$((out_of_reach + 1))
            if is_lost; then
              remove
            elif ((out_of_reach < patience)); then
              pause
            else
              say_all_of "$ssh_errors"
              fail "no ssh, $out_of_reach times in a row, to $(unreached)"
            fi ;;
          *)
            [[ -z $delete ]] || delete
            [[ $job == 0 ]] || fail "the command ended with $job on $name; see: launch/$program log $name --zone $zone"
            say "the command is finished"
            return ;;
        esac ;;
      *)
        owe
        if is_lost; then remove; else wait_until_up || true; fi ;;
    esac
  done
}
