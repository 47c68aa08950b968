"""Rollouts from vLLM in this process: for one GPU that samples and trains in turn.

One engine stays resident, since starting it takes half a minute or more. Between two calls of `generate` it sleeps (its
weights go to the machine's memory, its cache is dropped), so that the update has the GPU's memory.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError
from models.base import base_hash, base_name, read_base
from models.policy import ADAPTER_CONFIG, Policy
from models.requests import PolicyFiles
from models.rollout import checks
from models.rollout.adapters import adapter_name, adapter_rank
from models.rollout.engine import EngineDescription, Progress, RolloutInput, RolloutOutput, StopReason
from models.rollout.vllm_python import REMEDY, offered_rank
from models.settings import VLLMEngine as VLLMSettings

LEAST_RANK = 8
"""Rank that is made room for where the first policy has no adapter (vLLM's smallest but 1)."""


class _Resident:
    """The vLLM engine of this process and what it holds."""

    def __init__(self, key: str, llm: Any, rank: int, sleeps: bool) -> None:
        self.key, self.llm, self.rank, self.sleeps = key, llm, rank, sleeps
        self.numbers: dict[str, int] = {}
        """Adapter's name → vLLM's number for it; a number is never given twice."""
        self.loaded: str | None = None
        self.weights: Path | None = None
        """Full weights that stand in the place of the base's; None: the base's own."""
        self.asleep = False


_resident: list[_Resident] = []


class VLLMEngine:
    """The rollout engine in process; see `models.rollout.engine.RolloutEngine`. It samples with the policy's files."""

    def __init__(self, policy: Policy, settings: VLLMSettings) -> None:
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"engine.kind vllm: vLLM cannot be imported here ({error}); {REMEDY} with engine.python"
            ) from None
        self.policy = policy
        self.settings = settings

    def load_adapter(self, path: Path | None) -> None:
        """Samples with the weights in `path` from now on; None: with the base."""
        self.policy = Policy.load(PolicyFiles(base=self.policy.files.base, weights=path), compute=self.policy.compute)

    def describe(self) -> EngineDescription:
        """Engine, version, dtype, longest row, hash of the adapter's tensors."""
        import vllm

        dtype = str(self.policy.network.dtype).removeprefix("torch.")
        return EngineDescription("vllm", vllm.__version__, dtype, self.policy.context, self.policy.adapter_hash())

    def generate(
        self,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[RolloutOutput]:
        """Samples every request with the delivered and probed policy; progress is told at the end.

        Raises UserError for a row over the context and where log-probabilities are not the trainer's.
        """
        checks.check_requests(requests, temperature, self.policy.context)
        if not requests:
            return []
        held = _engine(self.policy, self.settings)
        if held.asleep:
            held.llm.wake_up()
            held.asleep = False
        try:
            adapter = self._deliver(held)
            self._probe(held, adapter, requests, temperature)
            outputs = self._sample(held, adapter, requests, temperature, tuple(stop_strings))
        finally:
            if held.sleeps:
                held.llm.sleep(level=1)
                held.asleep = True
        if progress is not None:
            progress(len(outputs), len(requests))
        return outputs

    def _deliver(self, held: _Resident) -> Any:
        """vLLM's request for the policy's adapter (None: no adapter), the former one removed; or full weights."""
        from vllm.lora.request import LoRARequest

        weights = self.policy.files.weights
        full = weights if weights is not None and not (weights / ADAPTER_CONFIG).is_file() else None
        if full is not None or held.weights is not None:
            source = str(full) if full is not None else base_name(self.policy.files.base)
            held.llm.collective_rpc("reload_weights", kwargs={"weights_path": source})
            held.llm.reset_prefix_cache()
            held.weights = full
        name = None if weights is None or full is not None else adapter_name(weights)
        if held.loaded is not None and held.loaded != name:
            held.llm.llm_engine.remove_lora(held.numbers[held.loaded])
        held.loaded = name
        if name is None or weights is None:
            return None
        number = held.numbers.setdefault(name, len(held.numbers) + 1)
        return LoRARequest(name, number, str(weights.resolve()))

    def _probe(self, held: _Resident, adapter: Any, requests: Sequence[RolloutInput], temperature: float) -> None:
        request = checks.probe_request(requests, self.policy.context)
        [output] = self._sample(held, adapter, [request], temperature, (), ends=False)
        figures = checks.probe_figures(self.policy, request, output, temperature)
        allowed = checks.tolerance(self.policy, self.settings.probe_tolerance)
        problem = checks.probe_problem(figures, allowed, temperature)
        if problem is not None:
            raise UserError(f"engine.kind vllm: {problem}")

    def _sample(
        self,
        held: _Resident,
        adapter: Any,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: tuple[str, ...],
        ends: bool = True,
    ) -> list[RolloutOutput]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                temperature=temperature,
                seed=checks.signed_seed(request.seed),
                max_tokens=request.max_new_tokens,
                stop_token_ids=sorted(self.policy.eos_ids) if ends else [],
                ignore_eos=not ends,
                stop=list(stop_strings) if ends else [],
                logprobs=0,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        answers = held.llm.generate(prompts, parameters, use_tqdm=False, lora_request=adapter)
        return [self._output(answer.outputs[0]) for answer in answers]

    def _output(self, answer: Any) -> RolloutOutput:
        ids = list(answer.token_ids)
        logprobs = [float(entry[token].logprob) for token, entry in zip(ids, answer.logprobs, strict=True)]
        kept = checks.finite_part(ids, logprobs)
        reason: StopReason = "error"
        if kept == len(ids) > 0:
            stops: dict[str, StopReason] = {"stop": "stop_string", "length": "length"}
            reason = "eos" if ids[-1] in self.policy.eos_ids else stops.get(answer.finish_reason, "error")
        return RolloutOutput(ids[:kept], logprobs[:kept], reason)


def _engine(policy: Policy, settings: VLLMSettings) -> _Resident:
    """The resident vLLM engine for the policy's base, started where there is none that fits."""
    weights = policy.files.weights
    rank = settings.max_rank or 0
    if weights is not None and (weights / ADAPTER_CONFIG).is_file():
        rank = max(rank, adapter_rank(weights))
    key = f"{base_hash(policy.files.base)} {policy.context} {policy.device} {settings.model_dump_json()}"
    if _resident and _resident[0].key == key and _resident[0].rank >= rank:
        return _resident[0]
    if _resident:
        _resident.pop().llm.llm_engine.engine_core.shutdown()
    _resident.append(_start(key, policy, settings, offered_rank(max(rank, LEAST_RANK))))
    return _resident[0]


def _start(key: str, policy: Policy, settings: VLLMSettings, rank: int) -> _Resident:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; read by vLLM on a CPU only
    from vllm import LLM

    base = read_base(policy.files.base)
    on_gpu = policy.device.type == "cuda"
    sleeps = settings.sleep and on_gpu
    options: dict[str, Any] = {"gpu_memory_utilization": settings.memory_share} if on_gpu else {}
    llm = LLM(
        model=base_name(policy.files.base),
        revision=base["revision"],
        dtype=base["dtype"],
        max_model_len=policy.context,
        max_num_seqs=settings.max_rows,
        enable_lora=True,
        max_lora_rank=rank,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enforce_eager=not (settings.compiled and on_gpu),
        enable_sleep_mode=sleeps,
        disable_log_stats=True,
        trust_remote_code=False,
        **options,
    )
    return _Resident(key, llm, rank, sleeps)
