"""Every environment variable that is read or set, for ``shardwise env`` and ``docs/environment.md``."""

from __future__ import annotations

VARIABLES = {
    "SHARDWISE_CACHE": "folder of what is kept between runs (tokenizers, token streams); ~/.cache/shardwise if not set",
    "XDG_CACHE_HOME": "in place of ~/.cache",
    "SHARDWISE_SHARED_MEMORY": "0 sends all between CPU ranks of one machine through gloo",
    "SHARDWISE_ONEDNN": "0 leaves fp32 products on the CPU to PyTorch's own choice",
    "CC": "C compiler of the CPU kernels; cc, gcc or clang if not set",
    "OMP_NUM_THREADS": "threads of each rank; the launcher sets the physical cores divided by the ranks",
    "TOKENIZERS_PARALLELISM": "true lets the tokenizer use several threads; false is set if it is not",
    "MALLOC_TRIM_THRESHOLD_": "of the C library; training keeps freed memory unless it is set",
    "MALLOC_MMAP_THRESHOLD_": "likewise",
    "TORCH_CPP_LOG_LEVEL": "PyTorch's own log; ERROR is set if it is not, but for --debug",
    "RES_OPTIONS": "of the resolver; the launcher sets a short time limit for its ranks",
    "GLOO_SOCKET_IFNAME": "network interface of CPU ranks; set to the loopback one, or the one that reaches the master",
    "NCCL_SOCKET_IFNAME": "likewise for CUDA ranks",
    "CUDA_DEVICE_MAX_CONNECTIONS": "of CUDA; 1 lets collectives start before the products that hide them",
    "RANK": "which rank this process is; set by launchers, with those below",
    "WORLD_SIZE": "number of ranks",
    "LOCAL_RANK": "which rank of this host",
    "LOCAL_WORLD_SIZE": "number of ranks on this host",
    "GROUP_RANK": "which host",
    "MASTER_ADDR": "where the ranks meet",
    "MASTER_PORT": "likewise",
    "TORCHELASTIC_RUN_ID": "set by torchrun: its ranks end when it does",
    "TORCHELASTIC_ERROR_FILE": "set by torchrun: the ranks of a host print an error once",
    "SHARDWISE_RANK_REPORTS": "set by the launcher: where ranks leave their errors",
    "SHARDWISE_LAUNCHER_PID": "set by the launcher: the process without which a rank ends",
}
"""Name and meaning, those for users first."""
