#!/usr/bin/env bash
# Starts N processes of one computation on this machine, each with its own virtual CPU devices, and waits for them:
#     scripts/launch_local.sh N [DEVICES] -- COMMAND ...
# Every process gets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which kvjax.device.join_processes
# reads; collectives go by gloo. Lines of their output begin with the process's number. When one fails the others are
# stopped, and its exit status is the script's.
set -uo pipefail
usage="usage: scripts/launch_local.sh N [DEVICES] -- COMMAND ..."
number="${1:?$usage}" devices=1
shift
if [ "${1:-}" != "--" ]; then devices="${1:?$usage}" && shift; fi
if [ "${1:-}" != "--" ] || [ $# -lt 2 ]; then echo "$usage" >&2 && exit 2; fi
shift
port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="$devices" JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
export JAX_COORDINATOR_ADDRESS="127.0.0.1:$port" JAX_NUM_PROCESSES="$number"
pids=()
for ((process = 0; process < number; process++)); do
    JAX_PROCESS_ID="$process" "$@" > >(sed "s/^/[$process] /") 2> >(sed "s/^/[$process] /" >&2) &
    pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null' EXIT
status=0
while [ "${#pids[@]}" -gt 0 ] && [ "$status" -eq 0 ]; do
    wait -n -p ended "${pids[@]}"
    status=$?
    for i in "${!pids[@]}"; do
        if [ "${pids[i]}" = "$ended" ]; then unset "pids[i]"; fi
    done
done
exit "$status"
