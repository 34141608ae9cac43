"""The first hour on a GPU: what scripts/first_light_gpu.sh runs, in stages, a process for each row."""
