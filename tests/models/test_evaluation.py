"""Graded answers to held-out questions."""

import pytest

from data.artifacts import read_rows, write_table
from data.errors import UserError
from data.progress import Silent
from data.settings import PlainPrompt
from models import evaluation
from models.evaluation import accuracy, answer, evaluate
from models.policy import Policy
from models.requests import AnswerRequest, EvaluateRequest, PolicyFiles
from models.rollout.engine import RolloutOutput
from models.settings import EvaluationSettings, TransformersEngine
from models.tokenization import prompt_ids
from tests.tiny import save_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def questions(tmp_path):
    rows = [
        {
            "task": "t",
            "benchmark": "held_out",
            "item_id": f"{(number * 7) % 10}",
            "question": f"What is {number} + 1?",
            "gold": str(number + 1),
            "answer_kind": "number",
            "subject": "sums",
            "split": "test" if number < 6 else "validation",
        }
        for number in range(10)
    ]
    path = tmp_path / "questions.parquet"
    write_table(path, "questions", rows)
    return path


def request(base, questions, **changes):
    settings = {
        "policy": PolicyFiles(base=base),
        "model": "warmup",
        "prompt": PlainPrompt(),
        "evaluation": EvaluationSettings(max_new_tokens=12),
        "engine": TransformersEngine(),
        "questions": questions,
    }
    return EvaluateRequest(**(settings | changes))


class Scripted:
    """An engine that answers a question with the text that belongs to it."""

    def __init__(self, policy, texts):
        self.policy, self.texts, self.asked = policy, texts, []

    def generate(self, requests, temperature, stop_strings=(), progress=None):
        self.asked += requests
        outputs = []
        for row in requests:
            text = self.texts[self.policy.tokenizer.decode(row.prompt_ids, skip_special_tokens=True)]
            ids = [*self.policy.tokenizer(text, add_special_tokens=False)["input_ids"], 2]
            outputs.append(RolloutOutput(ids, [-1.0] * len(ids), "eos"))
        return outputs


def test_answers_are_graded_and_filed(base, questions, tmp_path, monkeypatch):
    texts = {f"What is {n} + 1?\n": f"{n} + 1 = {n + 1}\n#### {n + 1 if n < 4 else 99}" for n in range(6)}
    engines = []

    def scripted(settings, policy):
        engines.append(Scripted(policy, texts))
        return engines[-1]

    monkeypatch.setattr(evaluation, "make_engine", scripted)
    out = tmp_path / "out"
    out.mkdir()
    figures = evaluate(request(base, questions), out, Silent())
    assert (figures["questions"], figures["answers"], figures["correct"]) == (6, 6, 4)
    assert figures["accuracy"] == pytest.approx(4 / 6)
    assert figures["interval"] == pytest.approx([0.29999, 0.90323], abs=1e-4)  # Wilson, 4 of 6
    rows = read_rows(out / "evaluations.parquet", "evaluations")
    assert [row["item_id"] for row in rows] == sorted(row["item_id"] for row in rows)
    right = next(row for row in rows if row["question"] == "What is 2 + 1?")
    assert right["completion"] == "2 + 1 = 3\n#### 3" and right["extracted"] == "3" and right["correct"]
    assert right["completion_tokens"] == 17 and right["stop_reason"] == "eos" and right["model"] == "warmup"
    # From the question alone, on the prompt path of training.
    tokenizer = Policy.load(PolicyFiles(base=base)).tokenizer
    expected = sorted(prompt_ids(tokenizer, row["question"], PlainPrompt()) for row in rows)
    assert sorted(list(row.prompt_ids) for row in engines[0].asked) == expected


def test_split_and_limit(base, questions, tmp_path):
    figures = evaluate(request(base, questions, split="validation", limit=3), tmp_path, Silent())
    assert figures["questions"] == 3
    with pytest.raises(UserError, match="no question in its split 'promotion'"):
        evaluate(request(base, questions, split="promotion"), tmp_path, Silent())


def test_several_samples_need_a_temperature_and_differ(base, questions, tmp_path):
    with pytest.raises(UserError, match="greedy answers are all the same"):
        evaluate(request(base, questions, evaluation=EvaluationSettings(samples=2)), tmp_path, Silent())
    settings = EvaluationSettings(samples=3, temperature=1.0, max_new_tokens=12)
    figures = evaluate(request(base, questions, evaluation=settings), tmp_path, Silent())
    assert figures["answers"] == 18 and "interval" not in figures
    rows = read_rows(tmp_path / "evaluations.parquet", "evaluations")
    assert len({row["completion"] for row in rows}) > 6


def test_greedy_evaluation_does_not_depend_on_the_seed(base, questions, tmp_path):
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        evaluate(request(base, questions, seed=seed), tmp_path / str(seed), Silent())
    assert (tmp_path / "0/evaluations.parquet").read_bytes() == (tmp_path / "1/evaluations.parquet").read_bytes()


def test_the_limit_shrinks_to_the_context_and_a_prompt_over_it_is_refused(base, tmp_path):
    path = tmp_path / "questions.parquet"
    row = {"task": "t", "benchmark": "b", "item_id": "0", "gold": "1", "answer_kind": "number", "split": "test"}
    write_table(path, "questions", [row | {"question": "x" * 240}])
    settings = EvaluationSettings(max_new_tokens=100)
    figures = evaluate(request(base, path, evaluation=settings), tmp_path, Silent())
    assert 1 <= figures["generated_tokens"] <= 256 - 242
    write_table(path, "questions", [row | {"question": "x" * 255}])
    with pytest.raises(UserError, match="question 0 of b has 257 tokens"):
        evaluate(request(base, path, evaluation=settings), tmp_path, Silent())


def test_accuracy_by_hand():
    row = {"item_id": "a", "correct": True, "stop_reason": "eos", "extracted": "1", "completion_tokens": 5}
    other = row | {"item_id": "b", "correct": False, "stop_reason": "length", "extracted": None}
    figures = accuracy([row, other], 0.95)
    assert (figures["accuracy"], figures["truncated_share"], figures["no_answer_share"]) == (0.5, 0.5, 0.5)
    assert figures["generated_tokens"] == 10


def test_answer_continues_a_prefix(base):
    asked = AnswerRequest(
        policy=PolicyFiles(base=base),
        prompt=PlainPrompt(),
        evaluation=EvaluationSettings(max_new_tokens=9),
        engine=TransformersEngine(),
        question="What is 1 + 1?",
    )
    plain = answer(asked, Silent())
    assert plain["tokens"] <= 9 and plain["prefix"] == "" and plain["stop_reason"] in ("eos", "length")
    begun = plain["completion"][:3]
    continued = answer(asked.model_copy(update={"prefix": begun}), Silent())
    whole = begun + continued["completion"]
    assert whole.startswith(plain["completion"])  # greedy: the given beginning is what it would have written
