#!/usr/bin/env bash
# Runs a command in several JAX processes on this machine, each with its own CPU devices.
#
#   launch/local_pod.sh -n 4 -d 2 -- bertjax train --distributed --config pretrain:size=tiny,corpus=runs/corpus ...
#
# Options: -n PROCESSES (default: 2), -d DEVICES per process (default: 1). Output lines of process I start with [I].
# SIGINT and SIGTERM reach every process as SIGTERM. The exit status is that of the first process that exits with a
# status other than 0, 42, 43 and 134. Without such a process, it is the highest status, where 134 counts as 43.
set -euo pipefail
# Starts each process in its own process group, so that Ctrl-C reaches it only through this script.
set -m

((BASH_VERSINFO[0] >= 5)) || { echo "local_pod.sh: bash $BASH_VERSION is too old; use 5.0 or newer" >&2; exit 1; }

processes=2 devices=1
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit "$1"; }
while getopts "n:d:h" option; do
  case $option in
    n) processes=$OPTARG ;;
    d) devices=$OPTARG ;;
    h) usage 0 ;;
    *) usage 2 >&2 ;;
  esac
done
shift $((OPTIND - 1))
[[ $# -gt 0 && $processes =~ ^[1-9][0-9]*$ && $devices =~ ^[1-9][0-9]*$ ]] || usage 2 >&2

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
export JAX_COORDINATOR_ADDRESS="localhost:$port" JAX_NUM_PROCESSES=$processes
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"

# Ignores the signals that stop the command, so that the command's last lines are printed.
prefix() { trap '' INT TERM; exec sed -u "s/^/[$1] /"; }

declare -A running=()
trap 'kill -TERM "${!running[@]}" 2> /dev/null || true' INT TERM
for ((index = 0; index < processes; index++)); do
  JAX_PROCESS_ID=$index "$@" > >(prefix "$index") 2> >(prefix "$index" >&2) &
  running[$!]=$index
done

status=0 failed=''
while ((${#running[@]})); do
  # `wait` returns early after a signal to this script, and if a process ended before the call.
  wait -n "${!running[@]}" 2> /dev/null || true
  for pid in "${!running[@]}"; do
    kill -0 "$pid" 2> /dev/null && continue
    code=0
    wait "$pid" || code=$?
    unset "running[$pid]"
    case $code in
      0 | 42 | 43) ((code <= status)) || status=$code ;;
      134) status=43 ;;  # JAX aborts a process whose peer is lost.
      *) failed=${failed:-$code} ;;
    esac
  done
  # Connected processes exit on their own. Processes that are not connected yet would wait for the failed process.
  if [[ $failed ]] && ((${#running[@]})); then
    sleep 2
    kill -TERM "${!running[@]}" 2> /dev/null || true
  fi
done
exit "${failed:-$status}"
