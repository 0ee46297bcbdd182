"""A stand-in for a serving engine: python fake_openai.py PORT MODE [TTFT_MS] [TPOT_MS]. Standard library only.

MODE: ok (streams at the given pace), oom, hang (never healthy), slow (healthy late), noids (text prompts, no ignore_eos),
nostream, die (ends at the third request), stubborn (ignores SIGTERM), child (leaves a worker in a session of its own).
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

port, mode = int(sys.argv[1]), sys.argv[2]
ttft_s, tpot_s = (float(v) / 1e3 for v in (sys.argv[3:5] or ("50", "10")))
seen = []


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def whole(self, status, tree):
        data = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            return self.whole(503 if mode == "hang" else 200, {})
        return self.whole(200, {"data": [{"id": "tiny/llama"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen.append(body)
        if mode == "die" and len(seen) > 5:
            os._exit(9)
        prompt = body["prompt"]
        if mode in ("noids", "nostream") and (isinstance(prompt, list) or "ignore_eos" in body):
            return self.whole(400, {"error": {"message": "prompt must be a string"}})
        if mode == "nostream" and body.get("stream"):
            return self.whole(400, {"error": {"message": "no streaming"}})
        tokens = len(prompt) if isinstance(prompt, list) else 3 + 2 * len(prompt.split())
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
        time.sleep(ttft_s)
        if not body.get("stream"):
            time.sleep(tpot_s * (body["max_tokens"] - 1))
            return self.whole(200, {"choices": [{"text": "x"}], "usage": usage})
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(body["max_tokens"]):
            time.sleep(tpot_s if i else 0)
            self.event({"choices": [{"text": "x", "finish_reason": None}]})
        self.event({"choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        return self.chunk(b"")

    def event(self, tree):
        self.chunk(b"data: " + json.dumps(tree).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


if mode == "oom":
    print("Model loading took 14.99 GiB memory and 3.1 seconds")
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    sys.exit(1)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__], start_new_session=True)
if mode == "slow":
    time.sleep(1.5)
print("Model loading took 1.50 GiB memory and 3.1 seconds")
print("GPU KV cache size: 12,345 tokens, Maximum concurrency for 512 tokens per request: 24.11x", flush=True)
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(3600)
