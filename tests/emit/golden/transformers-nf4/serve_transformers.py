#!/usr/bin/env python3
# Written by `planner emit`; edits are lost when it runs again.
# Settings of the plan are in PLAN; MODEL, SERVED_NAME, BIND_ADDRESS and PORT override it.
import datetime
import http.server
import importlib.util
import json
import os
import queue
import secrets
import signal
import sys
import threading
import time
import uuid

import torch
import torch.distributed as dist
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PLAN = {'model': 'Qwen/Qwen2.5-32B-Instruct',
 'precision': 'bnb-nf4',
 'dtype': 'bfloat16',
 'port': 8000,
 'max_batch': 4,
 'max_model_len': 4096,
 'tensor_parallel': 1,
 'quantization': {'config': 'BitsAndBytesConfig',
                  'settings': {'load_in_4bit': True,
                               'bnb_4bit_quant_type': 'nf4',
                               'bnb_4bit_use_double_quant': True,
                               'bnb_4bit_compute_dtype': 'bfloat16'}},
 'checkpoint': None}
MODEL = os.environ.get("MODEL") or PLAN["model"]
SERVED_NAME = os.environ.get("SERVED_NAME") or PLAN["model"]
HOST = os.environ.get("BIND_ADDRESS") or "0.0.0.0"
PORT = int(os.environ.get("REPLICA_PORT") or os.environ.get("PORT") or PLAN["port"])
MAX_BATCH, MAX_MODEL_LEN, BATCH_WAIT_S = PLAN["max_batch"], PLAN["max_model_len"], 0.02

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world != PLAN["tensor_parallel"]:
    sys.exit(f"the plan shards over {PLAN['tensor_parallel']} processes, {world} were started")
cuda = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
dtype = getattr(torch, PLAN["dtype"])
control = None
if world > 1:
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo", timeout=datetime.timedelta(minutes=30))
    control = dist.new_group(backend="gloo")


def load():
    """The model as planned: dtype, quantisation, attention kernel, tensor parallel."""
    config = AutoConfig.from_pretrained(MODEL)
    stored = getattr(config, "quantization_config", None) or {}
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    if PLAN["checkpoint"] and stored.get("quant_method") != PLAN["checkpoint"]:
        sys.exit(f"MODEL {MODEL!r} is stored as {stored.get('quant_method')!r}; the plan needs a {PLAN['checkpoint']} checkpoint: set MODEL")
    how = {"dtype": dtype, "attn_implementation": "sdpa"}
    half = dtype in (torch.float16, torch.bfloat16)
    if cuda and half and torch.cuda.get_device_capability(device) >= (8, 0) and importlib.util.find_spec("flash_attn"):
        how["attn_implementation"] = "flash_attention_2"
    if PLAN["quantization"] and not stored:
        settings = {k: getattr(torch, v) if k == "bnb_4bit_compute_dtype" else v for k, v in PLAN["quantization"]["settings"].items()}
        how["quantization_config"] = getattr(transformers, PLAN["quantization"]["config"])(**settings)
    if world > 1:
        from transformers.distributed import DistributedConfig

        how["distributed_config"] = DistributedConfig(tp_size=world, tp_plan="auto")
    else:
        how["device_map"] = {"": device}
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, config=config, **how).eval()
    if rank == 0:
        print(f"loaded {MODEL} as {PLAN['precision']}, attention {loaded.config._attn_implementation}, {world} process(es)", flush=True)
    return loaded


tokenizer = AutoTokenizer.from_pretrained(MODEL)
tokenizer.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
model = load()

# --- Serving: static batches behind a small OpenAI-compatible server (standard library only) -----------------------------
# A batch runs until its longest answer is done; requests that arrive meanwhile wait for the next one. That is what the plan's
# figures assume for this engine. No streaming. Engines with continuous batching carry several times the load.


class Request:
    """One prompt on its way through a batch."""

    def __init__(self, prompt_ids, max_tokens, temperature, top_p):
        self.prompt_ids, self.max_tokens = prompt_ids, max_tokens
        self.sampling = (temperature, top_p)
        self.done = threading.Event()
        self.output_ids, self.error = None, None


def generate(batch, sampling):
    """Runs one padded batch to its end on all ranks; a list of new token ids per prompt."""
    temperature, top_p = sampling
    width = max(len(ids) for ids, _ in batch)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p, _ in batch], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch], device=device)
    how = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {"do_sample": False}
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max(n for _, n in batch), pad_token_id=pad, **how
        )
    stops = model.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    answers = []
    for row, (_, limit) in zip(out[:, width:].tolist(), batch, strict=True):
        row = row[:limit]
        end = next((i for i, token in enumerate(row) if token in stops), len(row))
        answers.append(row[:end])
    return answers


def share(item):
    """Rank 0's item on every rank. Over gloo, and called at least every 20 s, so that an idle server does not time out."""
    if world == 1:
        return item
    box = [item]
    dist.broadcast_object_list(box, src=0, group=control)
    return box[0]


def run_batches(waiting):
    """The loop of the main thread: rank 0 forms batches and shares them, all ranks compute."""
    held = []
    while True:
        batch, work = [], None
        if rank == 0:
            batch, held = form_batch(waiting, held)
            work = ([(r.prompt_ids, r.max_tokens) for r in batch], batch[0].sampling, secrets.randbits(31)) if batch else None
        work = share(work)
        if work is None:
            continue
        torch.manual_seed(work[2])  # ranks must draw the same tokens
        try:
            answers = generate(work[0], work[1])
        except Exception as error:  # a failed batch must not take the server down when it runs alone
            if world > 1:
                raise
            for r in batch:
                r.error = f"{type(error).__name__}: {error}"
                r.done.set()
            continue
        for r, answer in zip(batch, answers, strict=False):
            r.output_ids = answer
            r.done.set()


def form_batch(waiting, held):
    """Up to MAX_BATCH waiting requests that sample alike, and those left over."""
    if not held:
        try:
            held = [waiting.get(timeout=20)]
        except queue.Empty:
            return [], []
        until = time.monotonic() + BATCH_WAIT_S
        while len(held) < MAX_BATCH and (left := until - time.monotonic()) > 0:
            try:
                held.append(waiting.get(timeout=left))
            except queue.Empty:
                break
    while not waiting.empty() and len(held) < 4 * MAX_BATCH:
        held.append(waiting.get_nowait())
    same = [r for r in held if r.sampling == held[0].sampling][:MAX_BATCH]
    return same, [r for r in held if r not in same]


class Handler(http.server.BaseHTTPRequestHandler):
    """GET /health, GET /v1/models, POST /v1/completions, POST /v1/chat/completions."""

    protocol_version = "HTTP/1.1"
    waiting = None

    def log_message(self, *_):
        pass

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            self.reply(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": SERVED_NAME, "object": "model"}]})
        else:
            self.reply(404, {"error": {"message": f"no {self.path} here"}})

    def do_POST(self):
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            chat = self.path == "/v1/chat/completions"
            if not chat and self.path != "/v1/completions":
                return self.reply(404, {"error": {"message": f"no {self.path} here"}})
            if body.get("stream"):
                raise ValueError("streaming is not offered by this static-batching server")
            if chat:
                ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
            else:
                if not isinstance(body["prompt"], str):
                    raise ValueError("prompt must be one string")
                ids = tokenizer(body["prompt"])["input_ids"]
            limit = int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)
            if limit < 1 or not ids or len(ids) + limit > MAX_MODEL_LEN:
                raise ValueError(f"{len(ids)} prompt tokens and {limit} new ones do not fit {MAX_MODEL_LEN}")
            request = Request(list(ids), limit, float(body.get("temperature", 1.0)), float(body.get("top_p", 1.0)))
        except (ValueError, KeyError, TypeError) as error:
            return self.reply(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
        Handler.waiting.put(request)
        request.done.wait()
        if request.error:
            return self.reply(500, {"error": {"message": request.error}})
        text = tokenizer.decode(request.output_ids, skip_special_tokens=True)
        used = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(request.output_ids)}
        used["total_tokens"] = sum(used.values())
        finish = "length" if len(request.output_ids) >= request.max_tokens else "stop"
        choice = {"index": 0, "finish_reason": finish}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        kind = "chat.completion" if chat else "text_completion"
        answer = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": SERVED_NAME}
        return self.reply(200, answer | {"choices": [choice], "usage": used})


def stop(*_):
    sys.exit(0)


def main():
    """Rank 0 answers HTTP in threads; every rank computes in its main thread."""
    signal.signal(signal.SIGTERM, stop)
    waiting, server = queue.Queue(), None
    if rank == 0:
        Handler.waiting = waiting
        server = http.server.ThreadingHTTPServer((HOST, PORT), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"ready on {HOST}:{PORT}", flush=True)
    try:
        run_batches(waiting)
    except KeyboardInterrupt:
        pass
    finally:
        if server is not None:
            server.shutdown()


if __name__ == "__main__":
    main()
