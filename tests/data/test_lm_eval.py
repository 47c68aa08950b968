"""The grader against lm-evaluation-harness: the same completions of the same 100 GSM8K questions, read from the file.

The harness's own task (its yaml, filters and metric) grades them; only its data set is the local file. Each way in
which the verdicts differ is a line of docs/grading.md.
"""

import re
from pathlib import Path

import pytest

from data.grading import grade

pytestmark = pytest.mark.benchmark_files
QUESTIONS = 100
STRICT, FLEXIBLE = "strict-match", "flexible-extract"

COMPLETIONS = {
    # name → the completion of a question with rationale {r}, gold {g} and another number {w}
    "hashes": "{r}\n#### {g}",
    "hashes, wrong": "{r}\n#### {w}",
    "hashes, dot": "{r}\n#### {g}.",
    "no space": "{r}\n####{g}",
    "no marker": "{r}",
    "nothing": "",
    "I do not know": "I cannot work this out.",
    "run-on": "{r}\n#### {g}\n\nQuestion: And how many are 2 + 2?\nAnswer: 2 + 2 = 4\n#### 4",
    "run-on after a wrong one": "{r}\n#### {w}\n\nQuestion: How many?\nAnswer: \n#### {g}",
    "taken back": "{r}\n#### {w}\nWait, that is not right. Let me correct it.\n#### {g}",
    "money": "{r}\n#### ${g}",
    "unit": "{r}\n#### {g} items",
    "decimals": "{r}\n#### {g}.00",
    "bold": "{r}\n#### **{g}**",
    "fraction": "{r}\n#### {g2}/2",
    "equation": "{r}\n#### x = {g}",
    "equation, wrong": "{r}\n#### {g} + 1 = {w}",
    "sum": "{r}\n#### {g} + 1",
    "range": "{r}\n#### {g}-{w}",
    "two answers": "{r}\n#### {g} #### {w}",
    "sprayed": "#### {g}\n#### {w}\n#### {w2}",
    "or": "{r}\n#### {g} or {w}",
    "exponent": "{r}\n#### {g}e3",
    "opposite": "{r}\n#### -{g}",
    "box": "{r}\nThe answer is \\boxed{{{g}}}.",
    "box, wrong": "{r}\nThe answer is \\boxed{{{w}}}, not {g}",
    "sentence": "{r}\nThe answer is {g}.",
    "sentence, wrong": "{r}\nThe answer is {w}.",
    "sentence and more": "{r}\nThe answer is {g}. I checked it {w} times.",
    "two in a sentence": "{r}\nShe had {w} and then {g}",
    "thinking": "<think>{r}\n#### {w}</think>\n#### {g}",
    "only thought": "<think>{r}\n#### {g}</think>",
    "never ends to think": "<think>{r}\n#### {g}",
}

SAME = {(0, 0, 0), (1, 1, 1)}
DIFFERENT = {
    # name → the verdicts (ratchet, strict-match, flexible-extract) that occur, where they are not all the same
    "no space": {(1, 0, 1)},
    "no marker": {(0, 0, 1), (1, 0, 1), (0, 0, 0)},
    "taken back": {(1, 0, 1)},
    "money": {(1, 0, 1)},
    "decimals": {(1, 0, 0)},
    "bold": {(1, 0, 1)},
    "fraction": {(1, 0, 0), (1, 0, 1)},
    "equation": {(1, 0, 1)},
    "equation, wrong": {(0, 1, 0)},
    "sum": {(0, 1, 0)},
    "range": {(0, 1, 0)},
    "two answers": {(0, 1, 0)},
    "sprayed": {(0, 1, 0)},
    "or": {(0, 1, 0)},
    "exponent": {(0, 1, 0), (0, 1, 1)},
    "box": {(1, 0, 1)},
    "box, wrong": {(0, 0, 1)},
    "sentence": {(1, 0, 1)},
    "two in a sentence": {(0, 0, 1)},
    "thinking": {(1, 0, 1)},
    "only thought": {(0, 1, 1)},
    "never ends to think": {(0, 1, 1)},
}


@pytest.fixture(scope="module")
def harness(benchmark_files, tmp_path_factory):
    """The harness's gsm8k task over the first questions of the file, without examples in the prompt."""
    import lm_eval
    import yaml
    from lm_eval.api.task import ConfigurableTask

    folder = tmp_path_factory.mktemp("gsm8k")
    with open(benchmark_files / "gsm8k/test.jsonl", encoding="utf-8") as lines:
        (folder / "test.jsonl").write_text("".join(line for _, line in zip(range(QUESTIONS), lines)))
    config = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
    for name in ("dataset_name", "training_split", "fewshot_split"):
        del config[name]
    files = {"data_files": {"test": str(folder / "test.jsonl")}, "cache_dir": str(folder / "cache")}
    task = ConfigurableTask(config=config | {"dataset_path": "json", "dataset_kwargs": files, "num_fewshot": 0})
    task.build_all_requests(rank=0, world_size=1)
    assert len(task.instances) == QUESTIONS
    return task


def verdicts(task, completions):
    """(strict-match, flexible-extract) of each completion, cut at the task's stop strings as its models are."""
    for instance, text in zip(task.instances, completions, strict=True):
        for stop in task.config.generation_kwargs["until"]:
            text = text.split(stop)[0]
        instance.resps, instance.filtered_resps = [text], {}
    task.apply_filters()
    return [
        tuple(
            bool(task.process_results(instance.doc, [instance.filtered_resps[name]])["exact_match"])
            for name in (STRICT, FLEXIBLE)
        )
        for instance in task.instances
    ]


def completions_of(doc, template):
    rationale, _, gold = doc["answer"].rpartition("\n#### ")
    number = int(gold.replace(",", ""))
    values = {"r": rationale, "g": gold, "w": number + 1, "w2": number + 2, "g2": 2 * number}
    return template.format(**values), gold


def observed(harness, name):
    pairs = [completions_of(instance.doc, COMPLETIONS[name]) for instance in harness.instances]
    ours = [grade(text, gold, "number").correct for text, gold in pairs]
    theirs = verdicts(harness, [text for text, _ in pairs])
    return [(int(one), *map(int, other)) for one, other in zip(ours, theirs)]


@pytest.mark.parametrize("name", COMPLETIONS)
def test_the_same_verdicts_or_an_explained_difference(harness, name):
    assert set(observed(harness, name)) <= DIFFERENT.get(name, SAME)
    if name in DIFFERENT:
        assert set(observed(harness, name)) == DIFFERENT[name]


def test_every_difference_is_explained():
    page = (Path(__file__).resolve().parents[2] / "docs" / "grading.md").read_text()
    explained = set(re.findall(r"^\| ([\w ,]+) \| `", page, re.MULTILINE))
    assert explained == set(DIFFERENT)
