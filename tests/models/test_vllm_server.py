"""The server engine against a server with faults: every row once and right, or an error that says what to do."""

import asyncio
import logging
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from data.seeds import derive_seed
from models.policy import Policy
from models.requests import PolicyFiles
from models.rollout import checks
from models.rollout.adapters import adapter_name, is_left_over
from models.rollout.dispatch import Dispatcher, Lost
from models.rollout.engine import RolloutInput
from models.rollout.engines import make_engine
from models.rollout.transformers_engine import TransformersEngine
from models.rollout.vllm_python import offered_rank
from models.settings import LoraTraining, VLLMServerEngine
from tests.fake_vllm import FakeVLLM
from tests.rl import CPU
from tests.tiny import save_base


def make_adapter(base, folder, seed, rank=2, scale=0.3):
    policy = Policy.load(PolicyFiles(base=base), LoraTraining(rank=rank, alpha=4), CPU, trainable=True, seed=seed)
    torch.manual_seed(seed)
    for _, parameter in policy.trainable_parameters():
        torch.nn.init.normal_(parameter, std=scale)
    policy.save(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    base = save_base(folder / "base")
    return {"base": base, "one": make_adapter(base, folder / "one", 1), "two": make_adapter(base, folder / "two", 2)}


@pytest.fixture
def servers(files):
    made = [FakeVLLM(files["base"]).start() for _ in range(2)]
    yield made
    for server in made:
        server.stop()


def policy_of(files, adapter):
    return Policy.load(PolicyFiles(base=files["base"], weights=adapter and files[adapter]), compute=CPU)


def engine_for(files, servers, adapter="one", **changes):
    quick = {"row_timeout_seconds": 20.0, "patience_seconds": 1.0, "concurrency": 4, **changes}
    chosen = VLLMServerEngine(urls=tuple(server.url for server in servers), **quick)
    return make_engine(chosen, policy_of(files, adapter))


def inputs(count=12, new=6):
    return [RolloutInput([1, 10 + number // 3, 40], derive_seed(number), new) for number in range(count)]


def expected(files, adapter, requests, temperature=1.0, stop=()):
    return TransformersEngine(policy_of(files, adapter)).generate(requests, temperature, stop)


def same(outputs, wanted):
    assert [(o.completion_ids, o.stop_reason) for o in outputs] == [(o.completion_ids, o.stop_reason) for o in wanted]
    for output, other in zip(outputs, wanted):
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(("adapter", "temperature"), [(None, 1.0), ("one", 0.0), ("two", 0.7)])
def test_rows_come_back_in_order_and_once(files, servers, adapter, temperature):
    engine, seen = engine_for(files, servers, adapter), []
    outputs = engine.generate(inputs(), temperature, progress=lambda done, total: seen.append((done, total)))
    same(outputs, expected(files, adapter, inputs(), temperature))
    assert seen == [(number, 12) for number in range(1, 13)]
    assert len(servers[0].asked) + len(servers[1].asked) == 12 + 2  # a probe each
    assert all(len(server.asked) > 1 for server in servers)


def test_stop_reasons(files, servers):
    requests = inputs(24, 40)
    stop = ("a", "Q")
    outputs = engine_for(files, servers).generate(requests, 1.0, stop)
    same(outputs, expected(files, "one", requests, 1.0, stop))
    assert {output.stop_reason for output in outputs} >= {"eos", "stop_string"}


def test_every_sampling_parameter_is_sent(files, servers):
    engine_for(files, servers[:1]).generate(inputs(1), 0.7)
    row = servers[0].asked[-1]
    assert row["seed"] == checks.signed_seed(derive_seed(0))
    assert {name: row[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty")} == {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert row["temperature"] == 0.7
    assert row["stop_token_ids"] == [2]


@pytest.mark.parametrize("fault", ["500", "reset", "not json"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_row_is_asked_for_again(files, servers, fault, count):
    servers[0].fault = lambda number, body: fault if number in (2, 5) else None
    outputs = engine_for(files, servers[:count], patience_seconds=10.0).generate(inputs(), 1.0)
    same(outputs, expected(files, "one", inputs()))


def test_a_hanging_row_is_asked_for_again_after_its_time(files, servers):
    servers[0].fault = lambda number, body: "hang" if number == 2 else None
    began = time.monotonic()
    outputs = engine_for(files, servers, row_timeout_seconds=1.0, patience_seconds=10.0).generate(inputs(), 1.0)
    same(outputs, expected(files, "one", inputs()))
    assert time.monotonic() - began >= 1.0
    assert len(servers[0].asked) + len(servers[1].asked) == 12 + 2 + 1  # a probe each, one row twice


def test_a_server_that_dies_is_replaced_by_the_other(files, servers):
    def die(number, body):
        if number == 4:
            threading.Thread(target=servers[0].stop).start()
            return "reset"
        return "reset" if servers[0].http is None else None

    servers[0].fault = die
    outputs = engine_for(files, servers).generate(inputs(30), 1.0)
    same(outputs, expected(files, "one", inputs(30)))
    assert len(servers[0].asked) < len(servers[1].asked)


def test_a_server_that_was_started_anew_gets_the_adapter_again(files, servers):
    server = servers[0]

    def forget(number, body):
        if number == 4:
            server.adapters.clear()

    server.fault = forget
    outputs = engine_for(files, [server], patience_seconds=10.0).generate(inputs(), 1.0)
    same(outputs, expected(files, "one", inputs()))
    assert [what for what, _ in server.history] == ["load", "load"]


def test_without_any_server_the_step_fails_with_the_reasons_and_may_be_retried(files, servers):
    engine = engine_for(files, servers, patience_seconds=0.3)
    for server in servers:
        server.stop()
    with pytest.raises(
        ConnectionError, match=r"no vLLM server has answered.*cannot be reached.*ratchet serve"
    ) as caught:
        engine.generate(inputs(), 1.0)
    assert all(server.url in str(caught.value) for server in servers)
    for server in servers:
        server.start()
    same(engine.generate(inputs(), 1.0), expected(files, "one", inputs()))


def test_a_row_that_is_always_lost_ends_the_step(files, servers):
    servers[0].fault = lambda number, body: "500" if body["prompt"][1] == 12 else None
    engine = engine_for(files, servers[:1], row_attempts=2, patience_seconds=30.0)
    with pytest.raises(ConnectionError, match=r"lost 2 times.*EngineCore"):
        engine.generate(inputs(), 1.0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("other prompt", "rewrites prompts"), ("no ids", "no token ids"), ("a token short", "log-probabilities where")],
)
def test_answers_to_another_question_are_refused(files, servers, fault, reason):
    servers[0].fault = lambda number, body: fault if number == 3 else None
    with pytest.raises(UserError, match=reason):
        engine_for(files, servers[:1]).generate(inputs(), 1.0)


def test_a_row_without_finite_distribution_is_an_error_and_keeps_what_was_before(files, servers):
    servers[0].fault = lambda number, body: "not finite" if number else None
    [output] = engine_for(files, servers[:1]).generate(inputs(1), 1.0)
    assert output.stop_reason == "error"
    assert output.completion_ids == expected(files, "one", inputs(1))[0].completion_ids[:1]


def test_an_adapter_has_a_name_of_its_own_and_the_old_one_is_unloaded(files, servers):
    server = servers[0]
    engine = engine_for(files, [server])
    engine.generate(inputs(2), 1.0)
    engine.generate(inputs(2), 1.0)
    engine.load_adapter(files["two"])
    same(engine.generate(inputs(4), 1.0), expected(files, "two", inputs(4)))
    one, two = adapter_name(files["one"]), adapter_name(files["two"])
    assert server.history == [("load", one), ("load", two), ("unload", one)]
    engine.load_adapter(None)
    same(engine.generate(inputs(4), 1.0), expected(files, None, inputs(4)))
    assert server.history[-1] == ("unload", two)


def test_adapters_of_others_stay(files, servers):
    server = servers[0]
    own = adapter_name(files["one"])
    prefix, host, _, content = own.split("-")
    foreign = f"{prefix}-{host}-1-{content}"
    server.adapters |= {
        foreign: server.policy,
        "mine": server.policy,
        f"{prefix}-{host}-99999999-{content}": server.policy,
    }
    engine_for(files, [server], "two").generate(inputs(1), 1.0)
    assert set(server.adapters) == {foreign, "mine", adapter_name(files["two"])}
    assert not is_left_over(f"{prefix}-00000000-99999999-{content}")


def refused(files, server, *, temperature=1.0, adapter="one", requests=None, **changes):
    with pytest.raises(UserError) as caught:
        engine_for(files, [server], adapter, **changes).generate(requests or inputs(2), temperature)
    return str(caught.value)


def test_what_a_user_can_mend_is_said_at_once(files, servers, tmp_path, monkeypatch):
    server = servers[0]
    server.runtime_loading = False
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in refused(files, server)
    server.runtime_loading = True
    make_adapter(files["base"], tmp_path / "wide", 3, rank=12)
    assert "larger --max-lora-rank" in refused({**files, "wide": tmp_path / "wide"}, server, adapter="wide")
    server.ignores_adapters = True
    assert "samples with the base although" in refused(files, server)
    server.ignores_adapters, server.raw_logprobs = False, True
    assert "--logprobs-mode processed_logprobs" in refused(files, server, temperature=0.5)
    server.raw_logprobs, server.context = False, 32
    long = [RolloutInput([1] * 30, 0, 3)]
    assert "row 0 has 30 tokens, and 3 new ones" in refused(files, server, requests=long)
    server.context, server.key = 256, "sesame-street"
    assert "VLLM_API_KEY" in refused(files, server)
    monkeypatch.setenv("VLLM_API_KEY", "sesame-street")
    engine_for(files, [server]).generate(inputs(2), 1.0)


def test_another_model_is_refused_with_both_names(files, tmp_path):
    from tests.tiny import tiny_llama

    other = FakeVLLM(save_base(tmp_path / "other", tiny_llama(seed=9))).start()
    try:
        message = refused(files, other, adapter=None)
    finally:
        other.stop()
    assert "not the trainer's" in message
    assert str(other.base) in message and str(files["base"]) in message


def test_an_address_that_is_no_server_of_ours(files, servers):
    servers[0].get = lambda to: servers[0].send(to, {"hello": 1})
    assert "does not answer as a vLLM server does" in refused(files, servers[0])


def test_the_key_and_passwords_are_in_no_message_and_no_log(files, servers, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "sesame-street")
    caplog.set_level(logging.DEBUG)
    servers[0].stop()
    engine = engine_for(files, servers[:1], patience_seconds=0.0)
    with pytest.raises(ConnectionError) as caught:
        engine.generate(inputs(1), 1.0)
    with pytest.raises(ValueError, match="VLLM_API_KEY") as other:
        VLLMServerEngine(urls=("http://me:hush@127.0.0.1:8000",))
    told = [error["msg"] for error in other.value.errors()]
    for text in (str(caught.value), *told, caplog.text):
        assert "sesame" not in text and "hush" not in text


def test_a_folder_that_trainer_and_servers_share(files, servers, tmp_path):
    engine = engine_for(files, servers[:1], adapter_folder=str(tmp_path / "shared"))
    same(engine.generate(inputs(3), 1.0), expected(files, "one", inputs(3)))
    assert (tmp_path / "shared" / adapter_name(files["one"]) / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "shared").glob(".part*"))


def test_over_the_context_is_refused_by_name_before_any_call(files, servers):
    long = [*inputs(2), RolloutInput([1] * 250, 0, 10)]
    assert "row 2" in refused(files, servers[0], requests=long)
    assert servers[0].asked == []


def test_describe(files, servers):
    engine = engine_for(files, servers)
    servers[0].stop()
    told = engine.describe()
    assert (told.name, told.version, told.context) == ("vllm_server", "0.0-fake", 256)
    assert told.adapter_hash == policy_of(files, "one").adapter_hash()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_folded_seeds_fit_and_stay_apart(one, two):
    assert -(2**63) <= checks.signed_seed(one) < 2**63
    assert (checks.signed_seed(one) == checks.signed_seed(two)) == (one == two)
    assert checks.signed_seed(one) & 0xFFFFFFFFFFFFFFFF == one


def test_offered_ranks():
    assert [offered_rank(rank) for rank in (1, 2, 8, 9, 64, 300)] == [1, 8, 8, 16, 64, 320]
    with pytest.raises(UserError, match="512"):
        offered_rank(513)


class Flaky:
    """A server that loses requests by a script of draws."""

    def __init__(self, name, lose):
        self.name, self.lose, self.prepared, self.inside = name, lose, 0, set()

    async def prepare(self):
        self.prepared += 1
        if next(self.lose):
            raise Lost("away")

    async def ask(self, index):
        assert index not in self.inside
        self.inside.add(index)
        await asyncio.sleep(0)
        self.inside.discard(index)
        if next(self.lose):
            raise Lost("lost")
        return (index, self.name)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_whatever_is_lost_every_row_is_answered_once(count, servers, concurrency, random):
    import models.rollout.dispatch as dispatch

    def draws():
        while True:
            yield random.random() < 0.2

    dispatch.BACK_OFF_SECONDS, kept = 0.0, dispatch.BACK_OFF_SECONDS
    try:
        made = [Flaky(str(number), draws()) for number in range(servers)]
        order = random.sample(range(count), count)
        told = []

        async def run():
            return await Dispatcher(
                made, order, concurrency=concurrency, attempts=1000, patience=60.0, progress=lambda *n: told.append(n)
            ).run()

        outputs = asyncio.run(run())
    finally:
        dispatch.BACK_OFF_SECONDS = kept
    assert [index for index, _ in outputs] == list(range(count))
    assert told == [(done, count) for done in range(1, count + 1)]
