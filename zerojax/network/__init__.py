"""The network that joins the nodes of a job, and what NCCL is told about it."""
