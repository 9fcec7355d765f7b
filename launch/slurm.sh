#!/usr/bin/env bash
#SBATCH --job-name=bertjax
#SBATCH --output=%x.log --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@180
# Batch script that runs a command once per GPU and requeues the job while the run can resume.
#
#   sbatch --nodes=4 --ntasks-per-node=8 --gres=gpu:8 --cpus-per-task=4 --time=24:00:00 launch/slurm.sh \
#     bertjax train --distributed --config pretrain:size=base,corpus=/shared/corpus --workdir /shared/runs/base
#
# The job uses the environment that is active at submission. Do not use --gpus-per-task, which hides GPUs from JAX. The
# job gets SIGTERM 180 s before its time limit, saves a checkpoint, and is requeued. If a process is lost or killed, the
# job is requeued unless it was already restarted BERTJAX_MAX_RESTARTS times (default: 20). This count includes restarts
# after preemptions and time limits.
set -euo pipefail
(($#)) || { echo "slurm.sh: no command; usage: sbatch OPTIONS launch/slurm.sh COMMAND" >&2; exit 2; }

# srun returns the highest status of all processes. Statuses 1 and 2, after which a restart would fail again, become 251
# and 252, so that they take precedence over 43 and 134 (other process lost). With this trap, Bash waits for the command
# after SIGTERM.
trap : TERM
# shellcheck disable=SC2016
process='trap : TERM; "$@"; code=$?; exit $((code == 1 || code == 2 ? code + 250 : code))'
code=0
srun --label --kill-on-bad-exit=0 bash -c "$process" bash "$@" || code=$?
case $code in
  251 | 252) code=$((code - 250)) can_resume='' ;;
  42) can_resume=yes ;;
  0) can_resume='' ;;
  *)
    can_resume=''
    if ((code == 43 || code >= 128)) && ((${SLURM_RESTART_COUNT:-0} < ${BERTJAX_MAX_RESTARTS:-20})); then
      can_resume=yes
    fi
    ;;
esac

# A cancelled job stays cancelled. Slurm itself requeues a preempted job.
if [[ $can_resume && $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T || echo RUNNING) == RUNNING ]]; then
  echo "slurm.sh: exit status $code; requeued to resume from the last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
else
  echo "slurm.sh: exit status $code; not requeued"
fi
exit "$code"
