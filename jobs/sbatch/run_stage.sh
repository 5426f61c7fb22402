#!/bin/bash
# run_stage.sh STAGE CONFIG... [KEY=VALUE...] runs one stage for the sbatch files of this folder.
# Task N of a job array takes the N-th configuration, on the cores and GPUs of its job.
set -euo pipefail

stage=$1
shift
configs=() overrides=()
for argument in "$@"; do
    # A path may also contain "=", but not directly after a key.
    if [[ $argument =~ ^[][[:alnum:]_.-]*= ]]; then
        overrides+=("$argument")
    else
        configs+=("$argument")
    fi
done
index=${SLURM_ARRAY_TASK_ID:-0}
if ((index >= ${#configs[@]})); then
    echo "task $index has no configuration: ${#configs[@]} are given; use --array=0-$((${#configs[@]} - 1))" >&2
    exit 2
fi

# "auto" is one rank per GPU. Without GPUs, use one rank per core of the job.
workers=auto
[[ -n ${SLURM_GPUS_ON_NODE:-} ]] || workers=${SLURM_CPUS_PER_TASK:-1}
[[ -d .venv/bin ]] && PATH=$PWD/.venv/bin:$PATH

sharmill run "${configs[index]}" "$stage" "executor.workers=$workers" "${overrides[@]}" &
run=$!

# The plain job number of an array's last task would mean the whole array.
job=${SLURM_JOB_ID}
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# Before the time limit (--signal in the sbatch files), end the run and requeue the job, which continues from the ledger
# of finished units. After preemption or the loss of a node, SLURM requeues the job itself.
queue_again() {
    kill -TERM "$run" 2>/dev/null || true
    wait "$run" || true
    scontrol requeue "$job"
}
trap queue_again USR1
trap 'kill -TERM "$run" 2>/dev/null || true' TERM

status=0
wait "$run" || status=$?
# A trap ends only the wait; the run itself may still be exiting.
while kill -0 "$run" 2>/dev/null; do
    wait "$run" || status=$?
done
exit "$status"
