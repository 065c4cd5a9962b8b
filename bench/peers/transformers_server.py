"""transformers' `generate` behind the smallest OpenAI-like server: token ids in, a stream out, one request at a time.

python bench/peers/transformers_server.py CHECKPOINT --port 8001 [--threads 2] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import http.server
import json
import threading

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Sent(BaseStreamer):
    """Writes an event for each token; the first call brings the prompt."""

    def __init__(self, write) -> None:  # noqa: ANN001
        self.write = write
        self.count = -1

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count:
            self.write({"choices": [{"text": str(int(value.flatten()[-1])) + " ", "finish_reason": None}]})

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=getattr(torch, options.dtype)).eval()
    one_at_a_time = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            ids = torch.tensor([body["prompt"]])
            self.send_response(200)
            self.end_headers()
            length = {"max_new_tokens": body["max_tokens"], "min_new_tokens": body["max_tokens"]}
            with one_at_a_time, torch.inference_mode():
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=Sent(self.event), **length
                )
            usage = {"prompt_tokens": ids.shape[1], "completion_tokens": body["max_tokens"]}
            self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, chunk: dict) -> None:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.flush()

    http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
