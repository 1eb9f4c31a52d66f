"""The commands, and what each is for."""

COMMANDS = {
    "plan": "groups, sizes, communicators, and what start-up will cost",
    "explain": "one rank's coordinate, and its peers in every group",
    "check": "under torchrun or srun: start the grid and try every communicator",
    "show": "pictures of a grid, a pipeline's schedule, a sharding, or a transfer",
    "presets": "grids that others use, by name; any of them as YAML",
    "diff": "what changes between two grids: sizes, names, neighbours, communicators",
    "bench": "under torchrun or srun: latency and bandwidth of every communicator",
    "trace": "what ranks have recorded: a table, a page, or a file for Perfetto",
    "diagnose": "which rank a job waits for, and in which call",
    "dump": "where each rank of a job on this host is, and its last calls",
    "verify": "whether what ranks have recorded can finish, under NCCL's rules and gloo's",
    "audit": "run a training script on several grids, and say where they part",
}
