#!/bin/bash
# Four workers of a study as an array of SLURM. Start the study once, then submit this file:
#   cohort study run group_size --runs /shared/runs --workers 0
#   sbatch slurm-array.sh group_size /shared/runs
#SBATCH --job-name=cohort
#SBATCH --array=0-3
#SBATCH --time=4:00:00
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=cohort-%A_%a.out

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun cohort study work "$1" --runs "$2"
status=$?
case $status in
  75) scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" ;; # SIGUSR2: preempted, or 120 s before the time limit
  130) sleep 600 ;;                                                      # SIGTERM: SLURM ends this job, or queues it again
esac
exit "$status"
