#!/usr/bin/env bash
# A real Slurm on this machine for tests: one slurmctld and two slurmd, the nodes n1 and n2, without services or accounts.
#
#   tests/cluster/setup_slurm.sh start FOLDER    # then: export SLURM_CONF=FOLDER/slurm.conf
#   tests/cluster/setup_slurm.sh stop FOLDER
#
# Needs Debian's packages slurmctld, slurmd and slurm-client (`apt-get install slurm-wlm`), and root. Two partitions: `low`
# (default; its jobs are requeued, after a grace time of two minutes, when `high` wants the nodes) and `high`.
set -euo pipefail

action=${1:?start or stop} folder=${2:?a folder}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
pids=$folder/pids

stop() {
  [ -f "$pids" ] || return 0
  while read -r pid; do kill "$pid" 2>/dev/null || true; done <"$pids"
  while read -r pid; do
    for _ in $(seq 50); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null || true
  done <"$pids"
  rm -f "$pids"
}

if [ "$action" = stop ]; then
  stop
  exit 0
fi

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
host=$(hostname -s) control=$(free_port) first=$(free_port) second=$(free_port)
mkdir -p "$folder"/state "$folder"/spool-n1 "$folder"/spool-n2
cat >"$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=1 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=120 MaxTime=60 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
END
: >"$pids"
trap 'stop' ERR
export SLURM_CONF=$folder/slurm.conf
slurmctld -D -f "$SLURM_CONF" >"$folder/slurmctld.out" 2>&1 &
echo $! >>"$pids"
for node in n1 n2; do
  slurmd -D -N "$node" -f "$SLURM_CONF" >"$folder/slurmd-$node.out" 2>&1 &
  echo $! >>"$pids"
done
disown -a
for _ in $(seq 120); do
  if [ "$(sinfo --noheader --format=%t --nodes=n1,n2 --partition=low 2>/dev/null | sort -u)" = idle ]; then
    echo "$SLURM_CONF"
    exit 0
  fi
  sleep 0.5
done
echo "the nodes did not become idle; see $folder/*.log" >&2
exit 1
