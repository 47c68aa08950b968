"""Base folders: a tiny model that is pre-trained, a pretrained one that is named."""

import json

import pytest
import torch

from data import storage
from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.progress import Silent
from data.seeds import derive_seed
from data.settings import PlainPrompt, SuiteSource
from data.suites import SUITES
from models.base import base_hash, base_name, load_base, prepare
from models.pretraining import common_pieces, documents, encode, plan_batches, word_tokenizer
from models.requests import BaseRequest
from models.settings import PretrainedModel, TinyLlama
from models.tokenization import decode
from tests.tiny import save_base, tiny_llama

SMALL = TinyLlama(
    hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64, pretrain_steps=12, pretrain_batch=8
)
NAMES = ["arithmetic_words", "program_words", "state_tracking"]


def request(model=SMALL, **changes):
    settings = {
        "model": model,
        "corpus": tuple(SuiteSource(suite=name) for name in NAMES),
        "prompts": (PlainPrompt(),) * len(NAMES),
    }
    return BaseRequest(**(settings | changes))


def test_a_tiny_model_learns_and_is_read_back(tmp_path):
    figures = prepare(request(), tmp_path, Silent())
    losses = [row["value"] for row in read_rows(tmp_path / "metrics.parquet", "metrics") if row["name"] == "loss"]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.3
    assert figures["documents"] == 96 and figures["left_out"] == 0
    model, tokenizer = load_base(tmp_path)
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    text = "def f():\n\treturn 'é'"
    assert decode(tokenizer, tokenizer(text)["input_ids"]) == text.replace("é", "")  # unknown characters are <unk>
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert {path.suffix for path in (tmp_path / "model").iterdir()} <= {".json", ".safetensors"}


def test_the_same_request_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        prepare(request(seed=seed), tmp_path / name, Silent())
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    assert base_hash(tmp_path / "a") == base_hash(tmp_path / "b") != base_hash(tmp_path / "c")


def test_excluded_questions_are_not_among_the_documents(tmp_path):
    questions = [example.question for example, _ in documents(request())]
    suite = SUITES[NAMES[0]]
    first = next(iter(suite.examples(1, derive_seed(0, "pretraining", suite.name, 0)))).question
    assert first in questions
    row = {"task": "t", "benchmark": "b", "item_id": "1", "question": first, "gold": "1", "split": "test"}
    write_table(tmp_path / "questions.parquet", "questions", [row])
    again = [example.question for example, _ in documents(request(excluded=(tmp_path / "questions.parquet",)))]
    assert len(again) == len(questions) and first not in again


def test_documents_learn_the_response_and_eos_after_one_bos():
    found = documents(request())
    tokenizer = word_tokenizer(common_pieces([example.response for example, _ in found]))
    rows, left_out = encode(found, tokenizer, 512)
    assert len(rows) == len(found) and left_out == 0
    for row, (example, _) in zip(rows, found):
        assert row.prompt_ids[0] == tokenizer.bos_token_id and row.completion_ids[-1] == tokenizer.eos_token_id
        assert decode(tokenizer, row.prompt_ids) == f"{example.question}\n"
        assert decode(tokenizer, row.completion_ids) == example.response


def test_common_pieces_are_single_tokens_and_others_are_spelt():
    tokenizer = word_tokenizer([" apples", "12", " ="])
    ids = tokenizer("12 apples = 123 applesauce", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["12", " apples", " ="]
    assert tokenizer.convert_ids_to_tokens(ids)[3:] == list(" 123 applesauce")
    assert decode(tokenizer, ids) == "12 apples = 123 applesauce"
    assert common_pieces(["12 b b", "12 b", "12 cc"] * 100) == [" b", " cc", "12"]


def test_plan_batches_uses_every_document_before_any_again():
    lengths = [number % 13 for number in range(50)]
    plan = plan_batches(lengths, 12, 8, seed=0)
    assert len(plan) == 12
    assert sorted(index for batch in plan[:7] for index in batch) == list(range(50))
    assert plan == plan_batches(lengths, 12, 8, seed=0) != plan_batches(lengths, 12, 8, seed=1)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"corpus": (), "prompts": ()}, "needs a corpus"),
        ({"corpus": (SuiteSource(suite="no_such"),), "prompts": (PlainPrompt(),)}, "unknown suite 'no_such'"),
        ({"prompts": (PlainPrompt(),)}, "one prompt for each suite"),
        ({"model": SMALL.model_copy(update={"hidden_size": 30})}, "hidden_size"),
        ({"model": SMALL.model_copy(update={"kv_heads": 3})}, "kv_heads"),
        ({"model": SMALL.model_copy(update={"context": 32})}, "no document fits"),
    ],
)
def test_bad_requests_are_user_errors(tmp_path, changes, match):
    with pytest.raises(UserError, match=match):
        prepare(request(**changes), tmp_path, Silent())


def test_no_pretraining_step_needs_no_corpus(tmp_path):
    model = SMALL.model_copy(update={"pretrain_steps": 0})
    prepare(request(model, corpus=(), prompts=()), tmp_path, Silent())
    assert load_base(tmp_path)[0].config.hidden_size == 32


def test_a_pretrained_model_from_a_local_folder(tmp_path):
    model = tiny_llama()
    weights = save_base(tmp_path / "base", model) / "model"
    (tmp_path / "out").mkdir()
    named = PretrainedModel(name=str(weights), dtype="bfloat16", context=64)
    figures = prepare(BaseRequest(model=named), tmp_path / "out", Silent())
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert json.loads((tmp_path / "out" / "base.json").read_text())["context"] == 64
    assert load_base(tmp_path / "out")[0].dtype == torch.bfloat16
    assert base_name(tmp_path / "out") == str(weights)
    before = base_hash(tmp_path / "out")
    tiny_llama(seed=9).save_pretrained(weights)
    assert base_hash(tmp_path / "out") != before


def test_pickled_weights_are_not_read(tmp_path):
    model = tiny_llama()
    (tmp_path / "weights").mkdir()
    model.config.save_pretrained(tmp_path / "weights")
    torch.save(model.state_dict(), tmp_path / "weights" / "pytorch_model.bin")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        prepare(BaseRequest(model=PretrainedModel(name=str(tmp_path / "weights"))), tmp_path / "out", Silent())


def test_a_folder_without_base_json_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"no base\.json"):
        load_base(tmp_path)


def test_a_base_on_an_object_store_is_named_by_url_and_content_hash(tmp_path, monkeypatch):
    monkeypatch.setenv("RATCHET_CACHE", str(tmp_path / "cache"))
    folder = save_base(tmp_path / "base", tiny_llama())
    ref = storage.publish(folder, f"memory://{tmp_path.name}/run/base", "key")
    for _ in range(2):  # downloaded, then found in the cache
        fetched = storage.fetch(ref)
        assert base_name(fetched) == f"memory://{tmp_path.name}/run/base/model#sha256={ref.sha256}"
    assert str(tmp_path) not in base_name(fetched).replace(tmp_path.name, "")
