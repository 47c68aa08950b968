"""The in-process engine's calls of vLLM, with a stand-in for it: adapters' numbers, sleep, a larger rank, the probe.

The real thing runs in test_vllm_in_process.py, without a GPU and so without sleep.
"""

import sys
from types import SimpleNamespace

import pytest

from data.errors import UserError
from data.seeds import derive_seed
from models.policy import Policy
from models.requests import PolicyFiles
from models.rollout import vllm_engine
from models.rollout.engine import RolloutInput
from models.rollout.engines import make_engine
from models.rollout.transformers_engine import TransformersEngine
from models.settings import VLLMEngine
from tests.models.test_vllm_server import expected, files, inputs, make_adapter, same  # noqa: F401
from tests.rl import CPU


class FakeLLM:
    """Samples with the transformers engine; remembers what was called."""

    made: list["FakeLLM"] = []

    def __init__(self, base, **options):
        self.base, self.options, self.calls, self.ignores_adapters = base, options, [], False
        self.asleep = False
        self.llm_engine = SimpleNamespace(
            remove_lora=lambda number: self.calls.append(("remove", number)),
            engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")),
        )
        FakeLLM.made.append(self)

    def sleep(self, level):
        self.calls.append(("sleep", level))
        self.asleep = True

    def wake_up(self):
        self.calls.append("wake")
        self.asleep = False

    def generate(self, prompts, parameters, use_tqdm, lora_request):
        assert not self.asleep
        self.calls.append(("generate", lora_request and lora_request.number))
        weights = None if lora_request is None or self.ignores_adapters else lora_request.path
        policy = Policy.load(PolicyFiles(base=self.base, weights=weights), compute=CPU)
        answers = []
        for prompt, wanted in zip(prompts, parameters, strict=True):
            policy.eos_ids = frozenset(wanted.stop_token_ids)
            request = RolloutInput(prompt["prompt_token_ids"], wanted.seed, wanted.max_tokens)
            [output] = TransformersEngine(policy).generate([request], wanted.temperature, wanted.stop)
            logprobs = [
                {token: SimpleNamespace(logprob=value)} for token, value in zip(output.completion_ids, output.logprobs)
            ]
            reason = {"eos": "stop", "stop_string": "stop", "length": "length"}[output.stop_reason]
            answer = SimpleNamespace(token_ids=output.completion_ids, logprobs=logprobs, finish_reason=reason)
            answers.append(SimpleNamespace(outputs=[answer]))
        return answers


@pytest.fixture
def vllm(files, monkeypatch):  # noqa: F811
    """The module vllm as a stand-in; gives the engines that were started."""

    def llm(model, **options):
        return FakeLLM(files["base"], **options)

    def lora_request(name, number, path):
        return SimpleNamespace(name=name, number=number, path=path)

    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(LLM=llm, SamplingParams=SimpleNamespace, __version__="0.0")
    )
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=lora_request))
    monkeypatch.setattr(vllm_engine, "_resident", [])
    FakeLLM.made = []
    return FakeLLM.made


def engine_for(files, adapter, **changes):  # noqa: F811
    weights = adapter and files[adapter]
    policy = Policy.load(PolicyFiles(base=files["base"], weights=weights), compute=CPU)
    return make_engine(VLLMEngine(**changes), policy)


def test_rows_are_those_of_the_policy_and_each_adapter_has_a_number_of_its_own(files, vllm):  # noqa: F811
    for adapter, temperature in (("one", 1.0), ("two", 0.7), (None, 0.0), ("one", 1.0)):
        engine = engine_for(files, adapter)
        same(engine.generate(inputs(4), temperature), expected(files, adapter, inputs(4), temperature))
    [llm] = vllm
    numbers = llm.calls
    assert [call[1] for call in numbers if call[0] == "generate"] == [1, 1, 2, 2, None, None, 1, 1]
    assert [call[1] for call in numbers if call[0] == "remove"] == [1, 2]
    assert llm.options["logprobs_mode"] == "processed_logprobs" and llm.options["generation_config"] == "vllm"


def test_stop_strings_and_ends(files, vllm):  # noqa: F811
    requests = [RolloutInput([1, 20, 40], derive_seed(number), 40) for number in range(12)]
    outputs = engine_for(files, "one").generate(requests, 1.0, ("a", "Q"))
    same(outputs, expected(files, "one", requests, 1.0, ("a", "Q")))


def test_it_sleeps_between_calls_even_after_a_failure(files, vllm):  # noqa: F811
    engine = engine_for(files, "one")
    engine.generate(inputs(2), 1.0)
    [held] = vllm_engine._resident
    held.sleeps = True
    vllm[0].calls.clear()
    engine.generate(inputs(2), 1.0)
    assert vllm[0].calls[-1] == ("sleep", 1)
    vllm[0].ignores_adapters = True
    with pytest.raises(UserError, match="samples with the base although"):
        engine.generate(inputs(2), 1.0)
    vllm[0].ignores_adapters = False
    engine.generate(inputs(2), 1.0)
    kinds = [call if isinstance(call, str) else call[0] for call in vllm[0].calls]
    assert kinds == [
        "generate",
        "generate",
        "sleep",
        "wake",
        "generate",
        "sleep",
        "wake",
        "generate",
        "generate",
        "sleep",
    ]


def test_a_larger_rank_starts_an_engine_with_room_for_it(files, vllm, tmp_path):  # noqa: F811
    engine_for(files, "one").generate(inputs(1), 1.0)
    make_adapter(files["base"], tmp_path / "wide", 3, rank=12)
    engine_for({**files, "wide": tmp_path / "wide"}, "wide").generate(inputs(1), 1.0)
    engine_for(files, "two").generate(inputs(1), 1.0)
    assert [llm.options["max_lora_rank"] for llm in vllm] == [8, 16]
    assert vllm[0].calls[-1] == "shutdown"


def test_over_the_context_is_refused_before_vllm_is_started(files, vllm):  # noqa: F811
    with pytest.raises(UserError, match="row 0"):
        engine_for(files, "one").generate([RolloutInput([1] * 250, 0, 10)], 1.0)
    assert vllm == []
