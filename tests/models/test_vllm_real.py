"""Rollouts over real vLLM servers on loopback: the trainer's numbers, adapters delivered, whole rounds, servers killed.

The tests share two servers and run in this order: the last ones kill them.
"""

import threading
from collections import Counter

import httpx
import pytest
import torch

from data.artifacts import read_rows
from data.errors import UserError
from data.progress import Silent
from data.seeds import derive_seed
from data.settings import MixedCurriculum, PlainPrompt, RewardSettings
from models.cell import run_rounds
from models.loracoe.adapters import read_adapter
from models.loracoe.export import export_adapter
from models.loracoe.gated import GatedModel
from models.loracoe.pool import build_pool
from models.policy import Policy
from models.requests import CellRequest, PolicyFiles
from models.rollout.engine import RolloutInput
from models.rollout.engines import make_engine
from models.rollout.transformers_engine import TransformersEngine
from models.scoring import TokenRow
from models.settings import EvaluationSettings, FullTraining, LoraTraining, RLSettings, VLLMServerEngine
from models.tokenization import decode
from tests.rl import CPU, LORA, write_questions, write_start_states
from tests.tiny import save_base, tiny_llama
from tests.vllm_servers import FULL, RealServer, needs_vllm, wait_gone

pytestmark = pytest.mark.vllm
BOUND = 1e-3
"""Largest mean difference of log-probabilities between engine and trainer, nats, float32."""


def make_adapter(base, folder, seed, rank=4, alpha=8, scale=0.15):
    policy = Policy.load(PolicyFiles(base=base), LoraTraining(rank=rank, alpha=alpha), CPU, trainable=True, seed=seed)
    torch.manual_seed(seed)
    for _, parameter in policy.trainable_parameters():
        torch.nn.init.normal_(parameter, std=scale)
    policy.save(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    needs_vllm()
    folder = tmp_path_factory.mktemp("real")
    base = save_base(folder / "base", tiny_llama(hidden=128))
    return {
        "folder": folder,
        "base": base,
        "one": make_adapter(base, folder / "one", 1),
        "two": make_adapter(base, folder / "two", 2, rank=2),
    }


@pytest.fixture(scope="module")
def three_servers(files):
    model = files["base"] / "model"
    made = [RealServer(model, files["folder"] / f"server{number}.log") for number in range(2)]
    made.append(RealServer(model, files["folder"] / "full.log", parameters=FULL))
    try:
        yield [server.wait() for server in made]
    finally:
        for server in made:
            server.stop()


@pytest.fixture(scope="module")
def servers(three_servers):
    """Two servers that take adapters."""
    return three_servers[:2]


def policy_of(files, weights):
    return Policy.load(PolicyFiles(base=files["base"], weights=weights and files.get(weights, weights)), compute=CPU)


def engine_for(files, servers, weights="one", **changes):
    urls = tuple(server.url for server in servers)
    return make_engine(VLLMServerEngine(urls=urls, **changes), policy_of(files, weights))


def inputs(count=48, new=16):
    return [RolloutInput([1, 10 + number // 4, 40], derive_seed(number), new) for number in range(count)]


def differences(policy, requests, outputs, temperature):
    """|engine − trainer| of every sampled token's log-probability, nats."""
    rows = [TokenRow(request.prompt_ids, output.completion_ids) for request, output in zip(requests, outputs)]
    with torch.no_grad():
        trainer = torch.cat(policy.completion_logprobs(rows, temperature))
    return (trainer - torch.tensor([value for output in outputs for value in output.logprobs])).abs()


@pytest.mark.parametrize("weights", [None, "one", "two"])
def test_logprobs_are_the_trainers(files, servers, weights):
    engine = engine_for(files, servers, weights)
    for temperature in (1.0, 0.6, 0.0):
        outputs = engine.generate(inputs(), temperature)
        assert differences(engine.policy, inputs(), outputs, temperature).mean() < BOUND


def test_the_same_seed_gives_the_same_sample_and_no_two_rows_are_alike(files, servers):
    first = engine_for(files, servers[:1]).generate(inputs(), 1.0)
    again = engine_for(files, servers[:1]).generate(inputs()[::-1], 1.0)[::-1]
    other = engine_for(files, servers[1:]).generate(inputs(), 1.0)
    ids = [output.completion_ids for output in first]
    assert ids == [output.completion_ids for output in again] == [output.completion_ids for output in other]
    assert len({tuple(row) for row in ids}) == len(ids)


def test_stop_reasons(files, servers):
    engine = engine_for(files, servers)
    engine.policy.eos_ids = frozenset({2, 50, 51})
    requests = inputs(96, 20)
    outputs = engine.generate(requests, 1.0, ("a", "Qx", "Z"))
    assert {output.stop_reason for output in outputs} == {"eos", "stop_string", "length"}
    for output in outputs:
        text = decode(engine.policy.tokenizer, output.completion_ids)
        before = decode(engine.policy.tokenizer, output.completion_ids[:-1])
        assert (output.completion_ids[-1] in (2, 50, 51)) == (output.stop_reason == "eos")
        assert not set(output.completion_ids[:-1]) & {2, 50, 51}
        assert any(stop in text for stop in ("a", "Qx", "Z")) == (output.stop_reason == "stop_string")
        assert not any(stop in before for stop in ("a", "Qx", "Z"))
        assert len(output.completion_ids) == 20 or output.stop_reason != "length"


def test_greedy_tokens_of_three_engines_on_200_prompts(files, servers):
    """vLLM, the transformers engine and `generate`; where two part, the two likeliest tokens are within 1e-4 nats."""
    torch.manual_seed(5)
    prompts = [[1, *torch.randint(4, 100, (3 + 4 * (number % 5),)).tolist()] for number in range(200)]
    new, parted = 20, 0
    for weights, chosen in (("one", prompts[:100]), ("two", prompts[100:])):
        engine = engine_for(files, servers, weights)
        requests = [RolloutInput(prompt, 0, new) for prompt in chosen]
        rows = {
            "vllm": [output.completion_ids for output in engine.generate(requests, 0.0)],
            "ours": [output.completion_ids for output in TransformersEngine(engine.policy).generate(requests, 0.0)],
            "generate": [None] * len(chosen),
        }
        for length in {len(prompt) for prompt in chosen}:
            places = [place for place, prompt in enumerate(chosen) if len(prompt) == length]
            ids = torch.tensor([chosen[place] for place in places])
            made = engine.policy.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                eos_token_id=2,
                pad_token_id=0,
            )
            for place, row in zip(places, made[:, length:].tolist()):
                rows["generate"][place] = row[: row.index(2) + 1] if 2 in row else row
        for place, prompt in enumerate(chosen):
            for name in ("ours", "generate"):
                one, two = rows["vllm"][place], rows[name][place]
                if one != two:
                    parted += 1
                    at = next(i for i in range(min(len(one), len(two))) if one[i] != two[i])
                    logits, _ = engine.policy.completion_logits([TokenRow(prompt, one[: at + 1])])
                    best = logits[-1].topk(2).values
                    assert best[0] - best[1] < 1e-4, (name, place, at)
    assert parted <= 4


def served(server):
    entries = httpx.get(f"{server.url}/v1/models").json()["data"]
    return [entry["id"] for entry in entries if entry["parent"]]


def test_two_adapters_in_succession_and_back_to_the_base(files, servers):
    engine = engine_for(files, servers, "one")
    names = []
    for weights in ("one", "two", "one"):
        engine.load_adapter(files[weights])
        outputs = engine.generate(inputs(), 1.0)
        assert differences(engine.policy, inputs(), outputs, 1.0).mean() < BOUND
        assert differences(policy_of(files, None), inputs(), outputs, 1.0).mean() > 100 * BOUND
        [name] = served(servers[0])
        assert served(servers[1]) == [name]
        names.append(name)
    assert names[0] == names[2] != names[1]
    engine.load_adapter(None)
    outputs = engine.generate(inputs(), 1.0)
    assert differences(engine.policy, inputs(), outputs, 1.0).mean() < BOUND
    assert served(servers[0]) == []


def test_full_weights_in_succession_and_back_to_the_base(files, three_servers, tmp_path):
    """The server that takes full weights; with it one policy's weights replace the other's."""
    server = three_servers[2]
    for seed in (1, 2):
        policy = Policy.load(PolicyFiles(base=files["base"]), FullTraining(), CPU, trainable=True)
        torch.manual_seed(seed)
        with torch.no_grad():
            for _, parameter in policy.trainable_parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        policy.save(tmp_path / f"full{seed}")
    engine = engine_for(files, [server], None)
    for weights in (None, tmp_path / "full1", tmp_path / "full2", None):
        engine.load_adapter(weights)
        outputs = engine.generate(inputs(), 1.0)
        assert differences(engine.policy, inputs(), outputs, 1.0).mean() < BOUND
    with pytest.raises(UserError, match=r"takes no full weights.*VLLM_SERVER_DEV_MODE=1"):
        engine_for(files, three_servers[:1], tmp_path / "full1").generate(inputs(2), 1.0)
    assert server.stop() == 0


@pytest.mark.parametrize("how", ["uniform", "pattern", "exact"])
def test_exported_adapters_are_served_as_the_gated_model_computes_them(files, servers, tmp_path, how):
    """The whole way: raw pool and gates → export → PEFT's policy → the server's samples, scored by the gated model."""
    pool = build_pool([read_adapter(files[name], name) for name in ("one", "two")])
    gates = pool.one_hot_gates("two")
    if how != "exact":
        generator = torch.Generator().manual_seed(7)
        for name, gate in gates.items():
            kept = torch.rand(gate.shape, generator=generator) < 0.5
            gates[name] = torch.rand(gate.shape, generator=generator) * kept
    exported = export_adapter(pool, gates, tmp_path / how, how, str(files["base"] / "model"), "card")
    assert exported.rank <= exported.max_lora_rank == 8
    outputs = engine_for(files, servers[:1], tmp_path / how).generate(inputs(), 1.0)
    gated_policy = policy_of(files, None)
    with GatedModel(gated_policy.network, pool) as gated:
        found = differences(gated_policy, inputs(), outputs, 1.0)
        gated.set_gates(gates)
        assert differences(gated_policy, inputs(), outputs, 1.0).mean() < BOUND
    assert found.mean() > 10 * BOUND, "the base would give others"


def test_an_adapter_that_no_server_takes_is_refused_before_it_is_delivered(files, tmp_path):
    wide = make_adapter(files["base"], tmp_path / "wide", 3, rank=513)
    engine = make_engine(VLLMServerEngine(urls=("http://127.0.0.1:1",)), policy_of(files, wide))
    with pytest.raises(UserError, match=r"up to rank 512, not 513.*compose fewer adapters"):
        engine.generate(inputs(2), 1.0)


def test_what_a_real_server_refuses(files, servers, tmp_path):
    wide = make_adapter(files["base"], tmp_path / "wide", 3, rank=12)
    with pytest.raises(UserError, match=r"rank 12.*larger --max-lora-rank"):
        engine_for(files, servers[:1], wide).generate(inputs(2), 1.0)
    for changes in ({"seed": 9}, {"context": 512}):
        other = save_base(tmp_path / f"{changes}", tiny_llama(**{"hidden": 128, **changes}))
        policy = Policy.load(PolicyFiles(base=other), compute=CPU)
        engine = make_engine(VLLMServerEngine(urls=(servers[0].url,)), policy)
        if "seed" in changes:
            with pytest.raises(UserError, match=r"not the trainer's.*it serves .*the run's base is"):
                engine.generate(inputs(2), 1.0)
        else:
            with pytest.raises(UserError, match=r"row 0 has 250 tokens.*--max-model-len 260"):
                engine.generate([RolloutInput([1] * 250, 0, 10)], 1.0)


def cell_request(files, folder, engine, parameters=LORA, warmup=None):
    return CellRequest(
        url=str(folder / "cell"),
        key="key",
        base=files["base"],
        warmup=warmup or files["two"],
        parameters=parameters,
        prompt=PlainPrompt(),
        curriculum=MixedCurriculum(n_stages=3),
        reward=RewardSettings(functions=("tests.rl:early_letters",)),
        rl=RLSettings(
            prompts=4, samples=3, steps=2, max_new_tokens=6, learning_rate=1e-2, max_rounds=2, validate_every=2
        ),
        evaluation=EvaluationSettings(max_new_tokens=4),
        engine=engine,
        start_states=write_start_states(folder / "start_states.parquet"),
        questions=write_questions(folder / "questions.parquet"),
        seed=7,
        compute=CPU,
    )


def check_cell(folder):
    """Two whole rounds were done, and what the engine said was what the trainer computed."""
    rows = read_rows(folder / "cell/result/metrics.parquet", "metrics")
    found = [row["value"] for row in rows if row["name"] == "engine_logprob_difference_mean"]
    assert len(found) >= 2
    assert max(found) < BOUND
    assert [row["round"] for row in rows if row["name"] == "reward"] == [0, 1]


def test_whole_rounds_over_the_servers(files, servers, tmp_path):
    engine = VLLMServerEngine(urls=tuple(server.url for server in servers))
    progress = run_rounds(cell_request(files, tmp_path, engine), Silent())
    assert progress["finished"]
    check_cell(tmp_path)


def killing(server, after):
    """Progress that kills a server when `after` rows are done."""
    killed = threading.Event()

    def progress(done, total):
        if done >= after and not killed.is_set():
            killed.set()
            server.crash()

    return progress


def test_a_server_killed_in_the_middle_of_a_batch_is_replaced_by_the_other(files, servers):
    requests = inputs(96, 40)
    family = servers[1].family()
    engine = engine_for(files, servers, concurrency=8)
    outputs = engine.generate(requests, 1.0, progress=killing(servers[1], 20))
    assert servers[1].process.wait(timeout=30) == 1
    assert wait_gone(family) == []
    assert differences(engine.policy, requests, outputs, 1.0).mean() < BOUND
    alone = engine_for(files, servers[:1]).generate(requests, 1.0)
    equal = Counter(output.completion_ids == other.completion_ids for output, other in zip(outputs, alone))
    assert equal[False] <= 2  # a draw within rounding of a boundary may part


def test_the_only_server_killed_in_the_middle_is_an_error_and_a_new_one_is_waited_for(files, servers):
    requests = inputs(96, 40)
    engine = engine_for(files, servers[:1], concurrency=8, patience_seconds=1.0)
    with pytest.raises(ConnectionError, match=r"no vLLM server has answered for .* cannot be reached"):
        engine.generate(requests, 1.0, progress=killing(servers[0], 20))
    assert servers[0].process.wait(timeout=30) == 1
    anew = RealServer(files["base"] / "model", files["folder"] / "anew.log", port=servers[0].port)
    try:
        engine = engine_for(files, servers[:1], patience_seconds=300.0)
        outputs = engine.generate(requests, 1.0)  # begins before the new server answers
        assert differences(engine.policy, requests, outputs, 1.0).mean() < BOUND
        family = anew.family()
        assert len(family) >= 2
        assert anew.stop() == 0
        assert wait_gone(family) == []
    finally:
        anew.stop()
