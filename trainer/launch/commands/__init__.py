"""Command lines of other launchers: DeepSpeed, Open MPI, torchrun and Slurm."""
