"""A study that is over in seconds."""

SMALL = {
    "name": "small",
    "title": "A study of seconds",
    "scope": "For tests.",
    "seeds": [1, 2],
    "least_questions": 12,
    "probe": 4,
    "run": {
        "model": {
            "hidden_size": 32, "layers": 2, "intermediate_size": 64, "pretrain_steps": 10, "pretrain_batch": 8,
            "pretrain_difficulties": [1],
        },
        "experts": {
            "arithmetic": None,
            "programs": None,
            "state": None,
            "sums": {"source": {"kind": "suite", "suite": "arithmetic_words", "difficulty": 2, "demonstrations": 24}},
            "rules": {"source": {"kind": "suite", "suite": "deduction", "difficulty": 2, "demonstrations": 24}},
        },
        "splits": {"validation": 6, "test": 12},
        "warmup": {"max_steps": 4, "batch_size": 8},
        "rl": {"generated_tokens": 500, "prompts": 4, "samples": 4, "max_new_tokens": 16, "validate_every": 1},
        "evaluation": {"max_new_tokens": 16},
        "compute": {"threads": 1},
    },
    "warmup_rule": {"every": 2, "demonstrations": 4, "samples": 1},
    "tuning": {"tasks": ["sums"], "seed": 0, "trials": [{"learning_rate": 1e-3}, {"learning_rate": 2e-3}]},
    "arms": {
        "base": {"kind": "base"},
        "warmup": {"kind": "warmup"},
        "longer": {
            "kind": "supervised",
            "warmup": {"max_steps": 4},
            "validate_every": 2,
            "trials": [{"learning_rate": 1e-3}, {"learning_rate": 2e-3}],
        },
        "plain_rl": {"kind": "rl", "curriculum": {"kind": "none"}},
        "adaptive": {"kind": "rl", "curriculum": {"kind": "adaptive"}},
        "adaptive_70": {
            "kind": "rl", "curriculum": {"kind": "adaptive"}, "budget_share": 0.7, "tuned_as": "adaptive",
        },
        "own": {"kind": "step", "function": "tests.study_steps:knows_all", "options": {"say": "hello"}},
    },
    "comparisons": [
        {"name": "adaptive_minus_rl", "first": "adaptive", "second": "plain_rl", "bar": 4.1, "interval_above": 0.0},
        {"name": "own_minus_base", "first": "own", "second": "base"},
    ],
}  # fmt: skip
