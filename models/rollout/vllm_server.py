"""Rollouts from vLLM servers: rows spread over them, the policy's adapter delivered and probed before every batch."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError
from models.base import base_name
from models.policy import ADAPTER_CONFIG, Policy
from models.requests import PolicyFiles
from models.rollout import checks
from models.rollout.adapters import adapter_name, adapter_rank, is_left_over, shared_place
from models.rollout.dispatch import Dispatcher, Lost
from models.rollout.engine import EngineDescription, Progress, RolloutInput, RolloutOutput, StopReason
from models.rollout.vllm_client import Refused, ServedModel, VLLMClient
from models.rollout.vllm_python import offered_rank
from models.settings import VLLMServerEngine as ServerSettings


class VLLMServerEngine:
    """The rollout engine over HTTP; see `models.rollout.engine.RolloutEngine`.

    It samples with what lies in the policy's files. A row's draws depend on its seed alone; rounding depends on what a
    server batches it with, so a draw may part where it lies within rounding of a boundary.
    """

    def __init__(self, policy: Policy, settings: ServerSettings) -> None:
        self.policy = policy
        self.settings = settings

    def load_adapter(self, path: Path | None) -> None:
        """Samples with the weights in `path` from now on; None: with the base."""
        self.policy = Policy.load(PolicyFiles(base=self.policy.files.base, weights=path), compute=self.policy.compute)

    def describe(self) -> EngineDescription:
        """The first server that answers: version and context; its dtype is not told. Raises Lost where none does."""

        async def ask(url: str) -> tuple[str, int]:
            client = VLLMClient(url, self.settings.row_timeout_seconds, 1)
            try:
                return await client.version(), (await client.model()).context
            finally:
                await client.aclose()

        reasons = []
        for url in self.settings.urls:
            try:
                version, context = asyncio.run(ask(url))
            except Lost as error:
                reasons.append(str(error))
                continue
            context = min(context, self.policy.context)
            return EngineDescription("vllm_server", version, "unknown", context, self.policy.adapter_hash())
        raise Lost("; ".join(reasons))

    def generate(
        self,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[RolloutOutput]:
        """Samples every request; a lost one is asked for again, on another server where there is one.

        Raises UserError for a row over the context, and for a server that serves another model, cannot take the
        adapter or gives other log-probabilities than the trainer; Lost (a ConnectionError) where no server answers.
        """
        checks.check_requests(requests, temperature, self.policy.context)
        if not requests:
            return []
        return asyncio.run(self._generate(requests, temperature, tuple(stop_strings), progress))

    async def _generate(
        self,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: tuple[str, ...],
        progress: Progress | None,
    ) -> list[RolloutOutput]:
        settings = self.settings
        batch = _Batch(self.policy, settings, requests, temperature, stop_strings)
        servers = [_Server(url, batch) for url in settings.urls]
        order = sorted(range(len(requests)), key=lambda index: (tuple(requests[index].prompt_ids), index))
        dispatcher: Dispatcher[RolloutOutput] = Dispatcher(
            servers,
            order,
            concurrency=settings.concurrency,
            attempts=settings.row_attempts,
            patience=settings.patience_seconds,
            progress=progress,
        )
        try:
            return await dispatcher.run()
        finally:
            for server in servers:
                await server.client.aclose()


class _Batch:
    """What the servers of one call have in common."""

    def __init__(
        self,
        policy: Policy,
        settings: ServerSettings,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: tuple[str, ...],
    ) -> None:
        self.policy, self.settings, self.requests = policy, settings, requests
        self.temperature, self.stop_strings = temperature, stop_strings
        self.allowed = checks.tolerance(policy, settings.probe_tolerance)
        weights = policy.files.weights
        self.full_weights = weights is not None and not (weights / ADAPTER_CONFIG).is_file()
        if weights is not None and not self.full_weights:
            offered_rank(adapter_rank(weights))  # raises where no server could take it
        self.adapter = None if weights is None or self.full_weights else adapter_name(weights)
        self.place = None if weights is None else shared_place(weights, settings.adapter_folder, self.adapter)

    def body(self, model: str, request: RolloutInput, ends: bool = True) -> dict[str, Any]:
        """A request's JSON. Every sampling parameter is given: a server's own defaults would change the samples."""
        return {
            "model": model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_new_tokens,
            "temperature": self.temperature,
            "seed": checks.signed_seed(request.seed),
            "stop_token_ids": sorted(self.policy.eos_ids) if ends else [],
            "ignore_eos": not ends,
            "stop": list(self.stop_strings) if ends else [],
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def output(self, choice: dict[str, Any], request: RolloutInput, who: str) -> RolloutOutput:
        """A completion checked and typed. Raises UserError where it is no answer to the request."""
        ids, asked = choice.get("token_ids"), list(request.prompt_ids)
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if ids is None or logprobs is None:
            raise UserError(f"{who} returned no token ids or log-probabilities; Ratchet needs vLLM 0.32 or newer")
        if choice.get("prompt_token_ids", asked) != asked:
            raise UserError(f"{who} continued other ids than it was sent: something between rewrites prompts")
        if len(ids) != len(logprobs) or len(ids) > request.max_new_tokens or not ids:
            raise UserError(
                f"{who} returned {len(ids)} ids with {len(logprobs)} log-probabilities where 1 to "
                f"{request.max_new_tokens} were asked for"
            )
        kept = checks.finite_part(ids, [float("nan") if value is None else value for value in logprobs])
        reason: StopReason = "error"
        if kept == len(ids):
            reason = self._reason(choice.get("finish_reason"), ids[-1])
        return RolloutOutput(ids[:kept], logprobs[:kept], reason)

    def _reason(self, finish: Any, last: int) -> StopReason:
        if last in self.policy.eos_ids:
            return "eos"
        return {"stop": "stop_string", "length": "length"}.get(finish, "error")


class _Server:
    """One server during one call of `generate`."""

    def __init__(self, url: str, batch: _Batch) -> None:
        self.client = VLLMClient(url, batch.settings.row_timeout_seconds, batch.settings.concurrency)
        self.name = self.client.name
        self.batch = batch
        self.model = ""
        """Under which name the policy is asked for."""

    async def prepare(self) -> None:
        """Sees what is served, delivers the policy, probes it, and unloads what is not needed any more."""
        batch = self.batch
        served = await self.client.model()
        self._check_context(served)
        if batch.full_weights or await self.client.has("/collective_rpc"):
            await self._reload(served)
        if batch.adapter is not None and batch.adapter not in served.adapters:
            await self._load(batch.adapter)
        self.model = batch.adapter or served.name
        await self._probe(served)
        for name in served.adapters - {batch.adapter}:
            if is_left_over(name):
                await self._unload(name)

    def _check_context(self, served: ServedModel) -> None:
        for index, request in enumerate(self.batch.requests):
            needed = len(request.prompt_ids) + request.max_new_tokens
            if needed > served.context:
                raise UserError(
                    f"row {index} has {len(request.prompt_ids)} tokens, and {request.max_new_tokens} new ones are "
                    f"asked for, but {self.name} serves a context of {served.context}; start it with --max-model-len "
                    f"{needed} or more, or lower max_new_tokens"
                )

    async def _load(self, name: str) -> None:
        """Delivers the adapter. Raises UserError with the remedy where the server cannot take it."""
        place = self.batch.place
        try:
            await self.client.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(place)})
        except Refused as error:
            reason = error.reason
            if "already been loaded" in reason:
                return
            raise UserError(f"{self.name} did not take the adapter {place}: {_remedy(error, place)}") from None

    async def _unload(self, name: str) -> None:
        try:
            await self.client.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except Refused as error:
            if error.status != 404:  # otherwise another process has unloaded it
                raise UserError(f"{self.name} did not unload the adapter {name}: {error.reason}") from None

    async def _reload(self, served: ServedModel) -> None:
        """Puts the policy's full weights into the served model, or the base's own back."""
        weights = str(self.batch.place) if self.batch.full_weights else served.root
        body = {"method": "reload_weights", "kwargs": {"weights_path": weights}}
        try:
            await self.client.call("POST", "/collective_rpc", body)
            await self.client.call("POST", "/reset_prefix_cache")
        except Refused as error:
            if error.status == 404:
                raise UserError(
                    f"{self.name} takes no full weights: start it with VLLM_SERVER_DEV_MODE=1, as `ratchet serve` does "
                    "for parameters.kind full, or train an adapter (parameters.kind lora)"
                ) from None
            raise UserError(f"{self.name} did not take the weights {weights}: {error.reason}") from None

    async def _probe(self, served: ServedModel) -> None:
        """Raises UserError where the server does not sample from the trainer's policy."""
        batch = self.batch
        request = checks.probe_request(batch.requests, min(served.context, batch.policy.context))
        output = await self._sample(self.model, request, "the probe", ends=False)
        figures = checks.probe_figures(batch.policy, request, output, batch.temperature)
        problem = checks.probe_problem(figures, batch.allowed, batch.temperature)
        if problem is not None:
            raise UserError(
                f"{self.name}: {problem}; it serves {served.root}, the run's base is "
                f"{base_name(batch.policy.files.base)}"
            )

    async def ask(self, index: int) -> RolloutOutput:
        """The output of row `index`."""
        return await self._sample(self.model, self.batch.requests[index], f"row {index}")

    async def _sample(self, model: str, request: RolloutInput, what: str, ends: bool = True) -> RolloutOutput:
        try:
            choice = await self.client.complete(self.batch.body(model, request, ends))
        except Refused as error:
            if error.status == 404 and "does not exist" in error.reason:
                raise Lost(
                    f"{self.name} has lost {model}"
                ) from None  # it was started anew: preparing it delivers again
            raise UserError(
                f"{self.name} refused {what}: {error.reason}; check that it serves the run's base model"
            ) from None
        return self.batch.output(choice, request, f"{self.name}, asked for {what},")


def _remedy(error: Refused, place: Path | None) -> str:
    reason = error.reason
    if error.status == 404 and "No adapter found" in reason:
        return (
            f"it does not see this folder; set engine.adapter_folder to one that this machine and the server share, or "
            f"run the server where {place} is ({reason})"
        )
    if error.status in (404, 405):
        return (
            "loading adapters at run time is off; start it with --enable-lora and the environment variable "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as `ratchet serve` does"
        )
    if "max_lora_rank" in reason:
        return f"{reason}; start it with a larger --max-lora-rank, as `ratchet serve` does"
    if "not enabled" in reason.lower():
        return f"{reason}; start it with --enable-lora, as `ratchet serve` does"
    return reason
