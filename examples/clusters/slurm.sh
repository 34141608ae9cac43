#!/usr/bin/env bash
#SBATCH --job-name=kvjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
# Slurm: a process on each node. One that fails ends the step, and the loop starts all again, up to ten times. A node
# that fails ends the job; Slurm then queues it again, where --requeue is allowed.
#     sbatch --requeue examples/clusters/slurm.sh MODEL FOLDER        # the folder is on a shared file system
set -uo pipefail
model="${1:?usage: sbatch slurm.sh MODEL FOLDER}" folder="${2:?usage: sbatch slurm.sh MODEL FOLDER}"
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export JAX_COORDINATOR_ADDRESS="$first:$((20000 + SLURM_JOB_ID % 20000))" JAX_NUM_PROCESSES="$SLURM_NTASKS"
for ((start = 0; start <= 10; start++)); do
    srun --kill-on-bad-exit=1 --wait=10 bash -c 'JAX_PROCESS_ID=$SLURM_PROCID exec "$@"' _ \
        python examples/clusters/serve.py --model "$model" --folder "$folder"
    status=$?
    if [ "$status" -eq 0 ]; then exit 0; fi
    echo "a process has failed with status $status; all start again" >&2
done
exit "$status"
