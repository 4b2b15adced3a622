#!/usr/bin/env bash
# One node of a training job: a Ray node, and torchrun's ranks on its GPUs. Slurm and Kubernetes run the same script.
#
#   NODES=8 NODE_RANK=0 HEAD_ADDRESS=10.0.0.1 CONFIG=run.yaml RUN_DIR=/shared/run bash docker/start_node.sh [a.b=c ...]
#
# Required: NODES, NODE_RANK (from 0), HEAD_ADDRESS (of node 0), CONFIG, RUN_DIR (on a file system all nodes share), and
# RAY_AUTH_TOKEN, a secret that is the same on all nodes. Optional:
#   NPROC_PER_NODE  ranks of this node (default: its GPUs)
#   RAY_PORT        of Ray's head on node 0 (default 6379)
#   MASTER_PORT     of torch's rendezvous on node 0 (default 29500)
#   RAY_GPUS        GPUs Ray may give to engines on this node (default: all)
#   RAY_HEAD        address of a Ray cluster that is there already; this node then joins it (default: node 0 starts one)
#   RAY_STORE_BYTES size of this node's object store (default: Ray's, 30 % of the memory)
#   RAY_NODES       nodes of the whole Ray cluster, waited for (default: NODES)
#   JOIN_TIMEOUT_S  how long they are waited for (default 300)
#   SEEN_AFTER_S    how long the shared file system may take to show what another node wrote (default 60)
#   STOPPED_STATUS  exit status after a stop (default 0), for schedulers that start only failed jobs again
#
# SIGTERM and SIGUSR1 ask for a stop at the end of the running step: the state is saved, "stopped" is written to RUN_DIR,
# and the exit status is STOPPED_STATUS. Started again it goes on from the last checkpoint. A configuration that cannot run
# ends with exit status 2.
set -euo pipefail

for name in NODES NODE_RANK HEAD_ADDRESS CONFIG RUN_DIR RAY_AUTH_TOKEN; do
  if [ -z "${!name:-}" ]; then
    echo "start_node.sh: $name is not set; see the top of $0" >&2
    exit 2
  fi
done
gpus=0
if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi
nproc=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}
head=${RAY_HEAD:-$HEAD_ADDRESS:${RAY_PORT:-6379}}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_ADDRESS=$head RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0 # 15 by default: engines would yield to the ranks that wait for them

has_checkpoint() { compgen -G "$RUN_DIR/checkpoints/step_*/state.json" >/dev/null; }

# A run that was started before may have a checkpoint that this node does not see yet: NFS shows another node's new folder
# up to a minute late. Without the wait it would be begun anew, by some nodes or all.
for _ in $(seq "${SEEN_AFTER_S:-60}"); do
  if [ ! -e "$RUN_DIR/metrics.jsonl" ] || has_checkpoint; then break; fi
  sleep 1
done
# Before the nodes meet, so that all see the same: no rank writes until every node has joined.
arguments=("train" "$CONFIG" "run.dir=$RUN_DIR" "$@")
if has_checkpoint; then
  arguments+=("trainer.resume=true")
elif [ "$NODE_RANK" = 0 ] && [ -e "$RUN_DIR/metrics.jsonl" ]; then
  # It ended before its first checkpoint. The folder itself stays: in a container it may be a mount.
  lost=$RUN_DIR/lost-$(date +%Y%m%d-%H%M%S)
  mkdir "$lost"
  for name in metrics.jsonl samples.jsonl masked_tokens.jsonl mismatch.npz tensorboard; do
    if [ -e "$RUN_DIR/$name" ]; then mv "$RUN_DIR/$name" "$lost"; fi
  done
fi
mkdir -p "$RUN_DIR"

ray_pid='' train_pid='' reason=$(mktemp)
# shellcheck disable=SC2329 # called by the traps
finish() {
  rm -f "$reason"
  if [ -n "$ray_pid" ]; then
    kill "$ray_pid" 2>/dev/null || true
    wait "$ray_pid" 2>/dev/null || true
  fi
}
trap finish EXIT
# shellcheck disable=SC2329
ask_to_stop() {
  echo "start_node.sh: node $NODE_RANK was asked to stop; the running step is finished first" >&2
  touch "$RUN_DIR/stop"
}
trap ask_to_stop TERM USR1

# Sessions of their own: Slurm signals the whole process group of a task, and a step needs its engines to finish.
node=(--num-cpus 64 --num-gpus "${RAY_GPUS:-$gpus}" --disable-usage-stats --block)
if [ -n "${RAY_STORE_BYTES:-}" ]; then node+=(--object-store-memory "$RAY_STORE_BYTES"); fi
if [ "$NODE_RANK" = 0 ] && [ -z "${RAY_HEAD:-}" ]; then
  node+=(--head --node-ip-address "$HEAD_ADDRESS" --port "${RAY_PORT:-6379}" --include-dashboard false)
else
  node+=(--address "$head")
  for _ in $(seq $((${JOIN_TIMEOUT_S:-300} / 2))); do # the head may take its time
    if (exec 3<>"/dev/tcp/${head%:*}/${head##*:}") 2>/dev/null; then break; fi
    sleep 2
  done
fi
setsid ray start "${node[@]}" >"$RUN_DIR/ray-node-$NODE_RANK.log" 2>&1 &
ray_pid=$!

python - "${RAY_NODES:-$NODES}" "${JOIN_TIMEOUT_S:-300}" <<'END' || exit 1
import os, sys, time
import ray
deadline = time.monotonic() + float(sys.argv[2])
while True:
    try:
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
        break
    except Exception as error:
        if time.monotonic() > deadline:
            sys.exit(f"start_node.sh: Ray did not come up ({error}), see ray-node-*.log in the run's folder")
        time.sleep(2)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    if time.monotonic() > deadline:
        sys.exit(f"{sum(node['Alive'] for node in ray.nodes())} of {sys.argv[1]} nodes joined")
    time.sleep(1)
END

# Who keeps the rendezvous is said, since torch would ask the resolver whether HEAD_ADDRESS is this host, which on many
# systems knows the host's name by a loopback address only.
# A default action of SIGUSR1 would end torchrun; ignored signals stay ignored across exec, and ranks set their own.
(
  trap '' USR1
  export TORCHELASTIC_ERROR_FILE=$reason
  exec setsid torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$nproc" --max-restarts 0 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD_ADDRESS:${MASTER_PORT:-29500}" --rdzv-id "${JOB_ID:-dppo}" \
    --rdzv-conf "is_host=$((NODE_RANK == 0))" \
    --no-python megatron-dppo "${arguments[@]}"
) &
train_pid=$!
status=0
while true; do
  wait "$train_pid" && status=0 || status=$?
  # A trapped signal ends `wait` early; the job is over when its process is.
  kill -0 "$train_pid" 2>/dev/null || break
done
# torchrun's own exit status is 1 whatever its ranks ended with.
if [ "$status" = 1 ] && grep -q '"errorCode": 2' "$reason"; then status=2; fi
if [ "$status" = 0 ] && [ -e "$RUN_DIR/stopped" ]; then status=${STOPPED_STATUS:-0}; fi
exit "$status"
