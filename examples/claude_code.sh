#!/bin/sh
# Run Claude Code on a local model: start a server, wait for it, start the agent, stop the server.
#
#   sh examples/claude_code.sh MODEL [ARGUMENTS OF claude...]
#
# A coding agent needs a model that calls tools, such as qwen3-coder:30b, and a context window of
# 32,768 tokens or more. The server keeps the agent's conversations on disk for the next start.
set -eu
model=${1:?give a model: sh examples/claude_code.sh qwen3-coder:30b}
shift
port=${PORT:-8080}
url=http://127.0.0.1:$port

mlxrunner serve "$model" --port "$port" --events "${EVENTS:-claude-events.jsonl}" &
server=$!
trap 'kill $server; wait $server || true' EXIT
until curl --silent --fail "$url/health" >/dev/null; do
  kill -0 "$server" || exit 1 # it has said why
  sleep 0.2
done
mlxrunner launch --url "$url" claude "$@"
