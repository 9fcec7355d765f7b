#!/usr/bin/env bash
# A pod on this machine: several processes that find each other, each with devices that are threads of the CPU.
#
#   launch/local_pod.sh -n 4 -d 2 -- bertjax train --distributed --config pretrain:size=tiny,corpus=runs/corpus ...
#
# -n PROCESSES (2), -d DEVICES of each (1). Each line of process I begins with [I]. The pod ends with the worst exit code
# of its processes; SIGINT and SIGTERM go to all of them.
set -euo pipefail

processes=2 devices=1
usage() { echo "usage: launch/local_pod.sh [-n PROCESSES] [-d DEVICES] -- COMMAND ..." >&2; exit 2; }
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

pids=()
for ((index = 0; index < processes; index++)); do
  JAX_PROCESS_ID=$index "$@" > >(sed -u "s/^/[$index] /") 2> >(sed -u "s/^/[$index] /" >&2) &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2> /dev/null || true' TERM INT HUP

worst=0
for pid in "${pids[@]}"; do
  code=0
  # A signal ends `wait`, not the process.
  while true; do
    wait "$pid" && code=0 || code=$?
    kill -0 "$pid" 2> /dev/null || break
  done
  ((code > worst)) && worst=$code
done
exit "$worst"
