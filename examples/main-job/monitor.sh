#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# bash monitor.sh smi | trace | metrics | health; URL of the server in URL.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
url="${URL:-http://127.0.0.1:30000}"
case "${1:-smi}" in
    smi) # use, memory, power, temperature
        exec amd-smi monitor --gfx --mem --vram-usage --power-usage --temperature --watch 5
        ;;
    trace) # starts the server under rocprofv3: kernel trace
        exec rocprofv3 --kernel-trace --output-directory trace -- bash "$here/serve.sh"
        ;;
    metrics) # queue, running requests, cache use, latency histograms (Prometheus text)
        exec curl -fsS "$url/metrics"
        ;;
    health)
        exec curl -fsS "$url/health"
        ;;
    *)
        echo "usage: bash monitor.sh smi|trace|metrics|health (here: $here)" >&2
        exit 2
        ;;
esac
