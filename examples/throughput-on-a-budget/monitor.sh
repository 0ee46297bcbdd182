#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# bash monitor.sh smi | dcgm | nsys | metrics | health; URL of the server in URL.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
url="${URL:-http://127.0.0.1:30000}"
case "${1:-smi}" in
    smi) # every 5 s: use, memory, power, clocks
        exec nvidia-smi --query-gpu=timestamp,index,name,utilization.gpu,utilization.memory,memory.used,memory.total,power.draw,temperature.gpu,clocks.sm --format=csv -l 5
        ;;
    dcgm) # every second: temperature, power, gpu_utilisation, framebuffer_used, sm_active, sm_occupancy, tensor_active, dram_active, pcie_tx, pcie_rx, nvlink_tx, nvlink_rx
        exec dcgmi dmon -e 150,155,203,252,1002,1003,1004,1005,1009,1010,1011,1012 -d 1000
        ;;
    nsys) # starts the server under Nsight Systems: kernels of DURATION s after DELAY s; send load meanwhile
        exec nsys profile --trace=cuda,nvtx,osrt --delay "${DELAY:-300}" --duration "${DURATION:-60}" \
            --output serve-%p bash "$here/serve.sh"
        ;;
    metrics) # queue, running requests, cache use, latency histograms (Prometheus text)
        exec curl -fsS "$url/metrics"
        ;;
    health)
        exec curl -fsS "$url/health"
        ;;
    *)
        echo "usage: bash monitor.sh smi|dcgm|nsys|metrics|health (here: $here)" >&2
        exit 2
        ;;
esac
