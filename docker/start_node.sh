#!/usr/bin/env bash
# One node of a training job, the same command on every node (bash, Slurm and Kubernetes run this script):
#
#   NODES=4 NODE_RANK=0 HEAD_ADDRESS=10.0.0.1 RUN_DIR=/shared/run RAY_AUTH_TOKEN=... \
#     bash docker/start_node.sh examples/run_qwen3_moe_dppo.sh [a.b=c ...]      # or run.yaml [a.b=c ...]
#
# The nodes meet, each starts a Ray node and its ranks. When a rank, an engine's node or a whole node is lost, all ranks end
# and start again from the newest whole state; a node that was lost is started by the same command. Variables:
#   RUN_DIR         folder of the run, on a file system that all nodes share (MODEL_DIR likewise)
#   NODES           of the job (default 1); more than one need the next three
#   NODE_RANK       of this one, from 0
#   HEAD_ADDRESS    of node 0
#   RAY_AUTH_TOKEN  a secret that is the same on all nodes
#   NPROC_PER_NODE  ranks of this node (default: its GPUs)
#   MAX_RESTARTS    starts again without a new state in between (default 3)
#   JOIN_TIMEOUT_S  how long nodes are waited for, at the start and when one was lost (default 300)
#   LOST_AFTER_S    a node without a sign of life for so long is lost (default 120)
#   SEEN_AFTER_S    how long the shared file system may take to show what another node wrote (default 60)
#   MASTER_PORT     at which node 0 waits for the others (default 29500)
#   RAY_PORT        of Ray's head on node 0 (default 6379)
#   RAY_HEAD        address of a Ray cluster that is there already; this node then joins it (default: node 0 starts one)
#   RAY_NODES       nodes of the whole Ray cluster, waited for (default: NODES)
#   RAY_GPUS        GPUs Ray may give to engines on this node (default: all)
#   RAY_STORE_BYTES size of this node's object store (default: Ray's, 30 % of the memory)
#   STOPPED_STATUS  exit status after a stop (default 0), for schedulers that start only failed jobs again
#   PYTHON          interpreter (default: python)
#
# SIGTERM and SIGUSR1 ask for a stop at the end of the running step: the state is saved, "stopped" is written to RUN_DIR,
# and the exit status is STOPPED_STATUS. Started again it goes on from the newest state. A configuration that cannot run
# ends with exit status 2.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # a lost node is told in one line, not by its sockets
exec "${PYTHON:-python}" -m megatron_dppo.launch "$@"
