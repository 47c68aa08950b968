"""The calls of a vLLM server that Ratchet makes, answered with the transformers engine, with faults at will."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from models.policy import Policy
from models.requests import PolicyFiles
from models.rollout.engine import RolloutInput
from models.rollout.transformers_engine import TransformersEngine
from tests.rl import CPU


class FakeVLLM:
    """Serves `base` on loopback. `fault(number, body)` may name a fault for a completion, probes counted."""

    def __init__(self, base: Path, context: int = 256, max_rank: int = 8):
        self.base, self.context, self.max_rank = base, context, max_rank
        self.fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None
        self.key: str | None = None
        self.runtime_loading = self.lora = True
        self.ignores_adapters = self.raw_logprobs = False
        self.adapters: dict[str, Policy] = {}
        self.history: list[tuple[str, str]] = []
        """(what, adapter's name) of loading and unloading."""
        self.asked: list[dict[str, Any]] = []
        """Completions asked for, probes included."""
        self.answered = 0
        self.lock = threading.Lock()
        self.policy = Policy.load(PolicyFiles(base=base), compute=CPU)
        self.http: ThreadingHTTPServer | None = None
        self.port = 0

    def start(self) -> "FakeVLLM":
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.get(self)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                fake.post(self, json.loads(self.rfile.read(length) or b"null"))

        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def stop(self) -> None:
        """The server is gone: nothing listens, what it held in memory is lost."""
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()
            self.http = None
        self.adapters.clear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, to: BaseHTTPRequestHandler, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode() if not isinstance(value, bytes) else value
        to.send_response(status)
        to.send_header("Content-Type", "application/json")
        to.send_header("Content-Length", str(len(data)))
        to.end_headers()
        to.wfile.write(data)

    def refuse(self, to: BaseHTTPRequestHandler, status: int, message: str) -> None:
        self.send(to, {"error": {"message": message}}, status)

    def get(self, to: BaseHTTPRequestHandler) -> None:
        if self.key is not None and to.headers.get("Authorization") != f"Bearer {self.key}":
            self.refuse(to, 401, "Unauthorized")
        elif to.path == "/v1/models":
            root = str(self.base / "model")
            entries = [{"id": "served", "root": root, "parent": None, "max_model_len": self.context}]
            entries += [{"id": name, "root": name, "parent": "served", "max_model_len": None} for name in self.adapters]
            self.send(to, {"data": entries})
        elif to.path == "/version":
            self.send(to, {"version": "0.0-fake"})
        else:
            self.refuse(to, 404, "Not Found")

    def post(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if to.path == "/v1/completions":
            self.complete(to, body)
        elif not self.runtime_loading:
            self.refuse(to, 404, "Not Found")
        elif to.path == "/v1/load_lora_adapter":
            self.load(to, body["lora_name"], Path(body["lora_path"]))
        elif to.path == "/v1/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None)
            self.history.append(("unload", body["lora_name"]))
            self.send(to, "Success") if known else self.refuse(to, 404, "cannot be found")
        else:
            self.refuse(to, 404, "Not Found")

    def load(self, to: BaseHTTPRequestHandler, name: str, path: Path) -> None:
        if not (path / "adapter_config.json").is_file():
            self.refuse(to, 404, f"Loading lora {name} failed: No adapter found for <path>")
            return
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > self.max_rank:
            self.refuse(to, 500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}.")
            return
        self.adapters[name] = Policy.load(PolicyFiles(base=self.base, weights=path), compute=CPU)
        self.history.append(("load", name))
        self.send(to, "Success")

    def complete(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self.lock:
            number = len(self.asked)
            self.asked.append(body)
        fault = self.fault(number, body)
        if fault == "500":
            self.refuse(to, 500, "EngineCore encountered an issue")
            return
        if fault == "reset":
            to.connection.close()
            to.close_connection = True
            return
        if fault == "hang":
            threading.Event().wait(3)
            return
        if fault == "not json":
            self.send(to, b"<html>")
            return
        if body["model"] != "served" and body["model"] not in self.adapters:
            self.refuse(to, 404, f"The model `{body['model']}` does not exist.")
            return
        self.send(to, {"choices": [self.choice(body, fault)]})
        self.answered += 1

    def choice(self, body: dict[str, Any], fault: str | None) -> dict[str, Any]:
        adapted = self.adapters.get(body["model"], self.policy)
        policy = self.policy if self.ignores_adapters else adapted
        request = RolloutInput(body["prompt"], body["seed"], body["max_tokens"])
        with self.lock:
            ends, policy.eos_ids = policy.eos_ids, frozenset(body["stop_token_ids"])
            try:
                [output] = TransformersEngine(policy).generate([request], body["temperature"], body["stop"])
            finally:
                policy.eos_ids = ends
        ids, logprobs = list(output.completion_ids), list(output.logprobs)
        if self.raw_logprobs and body["temperature"]:
            from models.scoring import TokenRow

            logprobs = policy.completion_logprobs([TokenRow(body["prompt"], ids)])[0].tolist()
        if fault == "other prompt":
            body = {**body, "prompt": [*body["prompt"], 5]}
        if fault == "no ids":
            ids = None
        if fault == "a token short":
            logprobs = logprobs[:-1]
        if fault == "not finite":
            logprobs[1:] = [-9999.0] * (len(logprobs) - 1)
        reason = {"eos": "stop", "stop_string": "stop", "length": "length"}[output.stop_reason]
        return {
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": reason,
        }
