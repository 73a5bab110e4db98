"""The network between the nodes of a job, and NCCL's variables for it."""
