#!/usr/bin/env bash
# A Slurm cluster with GPUs: one process a GPU, as a job that is queued again when it was preempted or can go on.
#
#   launch/slurm.sh create bert --nodes 4 --gpus 8 --time 24:00:00 -- \
#     bertjax train --distributed --config pretrain:size=base,corpus=/shared/corpus --workdir /shared/runs/base
#
#   create NAME ... -- COMMAND   submit launch/slurm/job.sh with what is given here
#   status NAME | log NAME | list | delete NAME
#
# --nodes N, --gpus G of each, --time LIMIT, --cpus N of each process (4), --partition P, --account A, --qos Q,
# --max-restarts N (20; preemptions and time limits are not counted), --output FILE (NAME.log), --dry-run (print the
# commands). The environment that is active is the job's. Before its time ends, a job has 180 seconds to save.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"

nodes='' gpus='' cpus=4 max_restarts=20 output='' time='' partition='' account='' qos=''
with_value=(--nodes --gpus --cpus --max-restarts --output --time --partition --account --qos)
read_arguments "$@"
need_name '^[a-zA-Z][a-zA-Z0-9_-]*$' 'letters, digits, _ and -'
output=${output:-$name.log}

case $verb in
  create)
    [[ $nodes =~ ^[1-9][0-9]*$ && $gpus =~ ^[1-9][0-9]*$ ]] || wrong "create needs --nodes and --gpus"
    need_command
    # --gpus-per-task would hide from each process all GPUs but its own, and JAX chooses by SLURM_LOCALID among all.
    act env BERTJAX_MAX_RESTARTS="$max_restarts" sbatch --job-name="$name" --nodes="$nodes" --ntasks-per-node="$gpus" \
      --gres="gpu:$gpus" --cpus-per-task="$cpus" --output="$output" --open-mode=append --requeue --signal=TERM@180 \
      --export=ALL ${time:+--time="$time"} ${partition:+--partition="$partition"} ${account:+--account="$account"} \
      ${qos:+--qos="$qos"} "$(dirname "$0")/slurm/job.sh" "${command[@]}" ||
      fail "the job was refused, why stands above; nothing is queued" ;;
  status) act squeue --user="$(id -un)" --name="$name" ;;
  log) act tail --lines=100 --follow=name --retry "$output" ;;
  list) act squeue --user="$(id -un)" ;;
  delete) act scancel --user="$(id -un)" --name="$name" ;;
  *) wrong "unknown verb $verb" ;;
esac
