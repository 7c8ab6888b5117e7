#!/bin/sh
# One host's part of a run over several hosts, the same on each: the variables say which host it is, the arguments are those
# of `shardwise train` (or of another command, named in COMMAND).
#
#   NODES       how many hosts there are
#   NODE_RANK   which this one is, from 0
#   MASTER      name or address of the host of rank 0, as the others reach it
#   GPUS        ranks on this host, one for each of its GPUs
set -eu
# torchrun's own default, of which it would print three lines.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS" \
    --master-addr "$MASTER" --master-port "${PORT:-29500}" -m shardwise "${COMMAND:-train}" "$@"
