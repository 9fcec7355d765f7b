#!/usr/bin/env bash
# What launch/slurm.sh submits. Runs the command once a GPU; queues itself again when the command can go on from its
# last checkpoint (42: it was asked to stop; 43, 128 and more: a process is gone), and not when it would fail again.
set -euo pipefail

# srun ends with the highest exit status of all processes. The one that would fail again must count, not those that then
# miss it: 1 and 2 travel as 251 and 252. SIGTERM is for the command; a shell that has a handler waits for it.
trap : TERM
# shellcheck disable=SC2016
process='trap : TERM; "$@"; code=$?; exit $((code == 1 || code == 2 ? code + 250 : code))'
code=0
srun --label --kill-on-bad-exit=0 bash -c "$process" bash "$@" || code=$?

# A job that was cancelled must stay so; one that was preempted Slurm queues again by itself.
queue_again() {
  local state
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=RUNNING
  if [[ $state == RUNNING ]]; then
    echo "job.sh: $1; queued again to go on from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "job.sh: $1; the job is $state, and left to Slurm"
  fi
}

case $code in
  0) exit 0 ;;
  251 | 252) code=$((code - 250)) ;;
  42) queue_again "asked to stop, and saved" ;;
  *)
    if ((code != 43 && code < 128)) || ((code == 130)); then
      echo "job.sh: ended with $code; not queued again"
    elif ((${SLURM_RESTART_COUNT:-0} < ${BERTJAX_MAX_RESTARTS:-20})); then
      queue_again "ended with $code"
    else
      echo "job.sh: ended with $code after $SLURM_RESTART_COUNT restarts; not queued again"
    fi ;;
esac
exit "$code"
