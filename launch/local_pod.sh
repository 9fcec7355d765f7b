#!/usr/bin/env bash
# A pod on this machine: several processes that find each other, each with devices that are threads of the CPU.
#
#   launch/local_pod.sh -n 4 -d 2 -- bertjax train --distributed --config pretrain:size=tiny,corpus=runs/corpus ...
#
# -n PROCESSES (2), -d DEVICES of each (1). Each line of process I begins with [I]. SIGINT and SIGTERM are SIGTERM to all
# of them; two seconds after one has failed, the others get it too. The pod ends with the exit code of the first that
# failed, else with 43, 42 or 0, the largest there is.
set -euo pipefail
# Each process is a group of its own, which Ctrl-C in a terminal does not reach by itself.
set -m

((BASH_VERSINFO[0] >= 5)) || { echo "launch/local_pod.sh: this is bash $BASH_VERSION; 5 or newer is needed" >&2; exit 1; }

processes=2 devices=1
usage() { echo "usage: launch/local_pod.sh [-n PROCESSES] [-d DEVICES] -- COMMAND ..." >&2; exit 2; }
[[ ${1:-} != --help && ${1:-} != -h ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0; }
while getopts "n:d:" option; do
  case "$option" in
    n) processes=$OPTARG ;;
    d) devices=$OPTARG ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[[ $# -gt 0 && $processes =~ ^[1-9][0-9]*$ && $devices =~ ^[1-9][0-9]*$ ]] || usage

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
export JAX_COORDINATOR_ADDRESS="localhost:$port" JAX_NUM_PROCESSES=$processes
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"

# Until the process has said its last.
marked() { trap '' INT TERM HUP; exec sed -u "s/^/[$1] /"; }

pids=() asked=''
trap 'asked=yes; kill -TERM "${pids[@]}" 2> /dev/null || true' TERM INT HUP
for ((index = 0; index < processes; index++)); do
  [[ -z $asked ]] || break
  JAX_PROCESS_ID=$index "$@" > >(marked "$index") 2> >(marked "$index" >&2) &
  pids+=($!)
done

((${#pids[@]})) || exit 143
worst=0 failed='' left=("${pids[@]}")
while ((${#left[@]})); do
  # A signal ends `wait`, not the process.
  wait -n "${left[@]}" || true
  running=()
  for pid in "${left[@]}"; do
    if kill -0 "$pid" 2> /dev/null; then
      running+=("$pid")
      continue
    fi
    wait "$pid" && code=0 || code=$?
    if ((code != 0 && code != 42 && code != 43)); then
      failed=${failed:-$code}
    elif ((code > worst)); then
      worst=$code
    fi
  done
  left=("${running[@]}")
  # Those that have found each other see it for themselves; one that waits for the others to come does not.
  if [[ -n $failed && -z ${ending:-} ]] && ((${#left[@]})); then
    (sleep 2 && kill -TERM "${left[@]}") 2> /dev/null &
    ending=$!
  fi
done
[[ -z ${ending:-} ]] || kill -- "-$ending" 2> /dev/null || true
exit "${failed:-$worst}"
