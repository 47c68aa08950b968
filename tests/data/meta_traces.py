"""Meta-action traces for tests: written by hand, and drawn by hypothesis."""

from hypothesis import strategies as st

from data.meta_actions.grammar import ACTIONS, LEGAL, MAX_BLOCKS, answer_block, block, verdict

GOLD = "7"


def attempt(answer: object) -> str:
    """The body of an attempt whose candidate is `answer`."""
    return f"3 + 4 = {answer}\n#### {answer}"


def critique(wrong_step: int | None, text: str = "Step 1 was looked at.") -> str:
    """A critique block."""
    return block("critique", f"{text}\n{verdict(wrong_step)}")


def trace(*blocks: str, answer: object = GOLD) -> str:
    """Blocks and the answer block, one below the other."""
    return "\n".join([*blocks, answer_block(str(answer))])


FIXED = trace(block("reason", attempt(8)), critique(1), block("refine", attempt(7)))


@st.composite
def legal_traces(draw, answers: tuple[int, ...] = (5, 6, 7)) -> str:
    """Legal traces over the gold 7, with bodies that carry candidates or none."""
    state, blocks = "start", []
    while True:
        choices = [a for a in LEGAL[state] if a != "answer" and len(blocks) < MAX_BLOCKS - 1]
        if "answer" in LEGAL[state]:
            choices.append("answer")
        if not choices or (state == "critique_wrong" and len(blocks) >= MAX_BLOCKS - 1):
            blocks.pop()  # an open "wrong" that nothing may follow any more
            break
        # An odd number of blocks may strand a critique at the limit: the loop above takes it back.
        action = draw(st.sampled_from(choices))
        if action == "answer":
            break
        if action == "critique":
            step = draw(st.sampled_from([None, 1, 2]))
            blocks.append(critique(step, draw(st.sampled_from(["Step 1 was looked at.", "1 + 1 = 2 holds"]))))
            state = "critique_correct" if step is None else "critique_wrong"
        else:
            body = attempt(draw(st.sampled_from(answers))) if draw(st.booleans()) else "let us see what is there"
            blocks.append(block(action, body))
            state = action
    gap = draw(st.sampled_from(["\n", "", "\n\n"]))
    return gap.join([*blocks, answer_block(str(draw(st.sampled_from(answers))))])


TAGS = [tag for action in ACTIONS for tag in (f"<{action}>", f"</{action}>")]
PIECES = [*TAGS, "\n", " ", "Verdict: correct", "Verdict: wrong at step 2", "\\boxed{7}", "abcd", "<", "é", "}"]
"""What random texts for the parser are made of."""
