"""Rollouts with the policy's own modules: shared prefill, preallocated cache, rows that leave and enter the batch.

Each distinct prompt is computed once; a prompt that begins another one (the nested start states of a demonstration)
is read off the longer one's pass. Finished rows are overwritten by live ones, so the batch is always dense, and
waiting rows enter when enough slots are free. All work in the token loop is on whole tensors. How one token is decoded
is `models.rollout.steps`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from data.errors import UserError
from models.policy import Policy
from models.requests import PolicyFiles
from models.rollout.direct import DirectStep, decodes_directly
from models.rollout.engine import EngineDescription, Progress, RolloutInput, RolloutOutput, RowGates, StopReason
from models.rollout.sampling import sample, uniforms
from models.rollout.slots import PrefillCache
from models.rollout.steps import ModelStep, Step
from models.scoring import logits_at, micro_batches
from models.tokenization import check_context, decode

PREFILL_TOKENS = 8192
"""Padded size of one prefill pass (our choice: its activations stay small beside the cache)."""

REASONS: tuple[StopReason | None, ...] = (None, "eos", "length", "error", "stop_string")
RUNNING, EOS, LENGTH, ERROR, STOP_STRING = range(5)

STOP_STRING_TAIL = 8
"""Tokens decoded beyond the characters of the longest stop string when a row's end is searched for one."""


class TransformersEngine:
    """The rollout engine inside the training process; see `models.rollout.engine.RolloutEngine`.

    It samples with the policy as it is at the moment of the call, so a policy that is being trained needs no delivery.
    """

    def __init__(self, policy: Policy, batch_size: int = 128, gates: RowGates | None = None) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.gates = gates or _own_gates(policy)
        """Gates that each row takes from its prompt, on layers of the policy's network; by default the policy's."""

    def load_adapter(self, path: Path | None) -> None:
        """Samples with the weights in `path` from now on; None: with the base."""
        self.policy = Policy.load(PolicyFiles(base=self.policy.files.base, weights=path), compute=self.policy.compute)
        self.gates = _own_gates(self.policy)

    def describe(self) -> EngineDescription:
        """Engine, version, dtype, longest row, hash of the adapter's tensors."""
        dtype = str(self.policy.network.dtype).removeprefix("torch.")
        return EngineDescription(
            "transformers", transformers.__version__, dtype, self.policy.context, self.policy.adapter_hash()
        )

    def generate(
        self,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[RolloutOutput]:
        """Samples every request; the same request gives the same row whatever it is batched with (floats permitting).

        Raises UserError for a prompt that does not fit the context with its new tokens.
        """
        if temperature < 0:
            raise UserError(f"temperature is {temperature}; give 0 (greedy) or more")
        for index, request in enumerate(requests):
            if request.max_new_tokens < 1:
                raise UserError(f"row {index} asks for {request.max_new_tokens} new tokens; give 1 or more")
            check_context(request.prompt_ids, request.max_new_tokens, self.policy.context, f"the prompt of row {index}")
        if not requests:
            return []
        with torch.inference_mode():
            decoder = _Decoder(self.policy, requests, self.batch_size, temperature, tuple(stop_strings), self.gates)
            return decoder.run(progress)


def _own_gates(policy: Policy) -> RowGates | None:
    return policy.routed.rows if policy.routed is not None else None


class _Decoder:
    """One call of `generate`: slots 0 .. live-1 hold the rows that are being decoded."""

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[RolloutInput],
        batch_size: int,
        temperature: float,
        stop_strings: tuple[str, ...],
        gates: RowGates | None,
    ) -> None:
        self.network, self.tokenizer, self.device = policy.sampling_network(), policy.tokenizer, policy.device
        self.requests, self.temperature, self.stop_strings = requests, temperature, stop_strings
        # In the order of their ids, rows of a group lie together and a prompt directly before those it begins.
        self.waiting = sorted(range(len(requests)), key=lambda index: (tuple(requests[index].prompt_ids), index))[::-1]
        self.outputs: dict[int, RolloutOutput] = {}
        self.slots = min(batch_size, len(requests))
        self.live = 0
        new = max(request.max_new_tokens for request in requests)
        make_step = DirectStep if decodes_directly(self.network) else ModelStep
        self.step: Step = make_step(self.network, self.slots, max(len(row.prompt_ids) for row in requests), new)

        def table(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(self.slots, *shape, dtype=dtype, device=self.device)

        self.request_R, self.last_R, self.position_R = table(), table(), table()
        self.count_R, self.limit_R, self.reason_R = table(), table(), table()
        self.ids_RN, self.logprobs_RN = table(new), table(new, dtype=torch.float32)
        self.uniform_RN = table(new if temperature else 0, dtype=torch.float64)
        self.ends_V = torch.zeros(self.network.get_output_embeddings().weight.shape[0], dtype=torch.bool)
        self.ends_V[[token for token in policy.eos_ids if token < len(self.ends_V)]] = True
        self.ends_V = self.ends_V.to(self.device)
        self.tables = [self.request_R, self.last_R, self.position_R, self.count_R, self.limit_R, self.reason_R]
        self.tables += [self.ids_RN, self.logprobs_RN, self.uniform_RN]
        self.gates = gates
        self.gates_R: dict[str, torch.Tensor] = {}
        """Module → gates of the rows, where they have gates of their own."""

    def run(self, progress: Progress | None) -> list[RolloutOutput]:
        """Decodes until every request has its output."""
        refill = max(1, self.slots // 4)
        reported = -1
        while self.waiting or self.live:
            if self.waiting and (self.live == 0 or self.slots - self.live >= refill):
                self._admit([self.waiting.pop() for _ in range(min(self.slots - self.live, len(self.waiting)))])
            else:
                last_R, positions_R = self.last_R[: self.live], self.position_R[: self.live]
                if self.gates is not None:
                    self.gates.set({name: stored[: self.live] for name, stored in self.gates_R.items()})
                logits_RV = self.step.logits(last_R, positions_R)
                positions_R += 1
                self._record(slice(0, self.live), logits_RV)
            self._retire()
            if progress is not None and len(self.outputs) != reported:
                reported = len(self.outputs)
                progress(reported, len(self.requests))
        if self.gates is not None:
            self.gates.set(None)
        return [self.outputs[index] for index in range(len(self.requests))]

    def _admit(self, indices: list[int]) -> None:
        """Computes the prompts of these requests, gives each a slot and samples its first token."""
        rows = [self.requests[index] for index in indices]
        first, self.live = self.live, self.live + len(rows)
        slots = slice(first, self.live)
        self.request_R[slots] = torch.tensor(indices, device=self.device)
        self.position_R[slots] = torch.tensor([len(row.prompt_ids) for row in rows], device=self.device)
        self.count_R[slots] = 0
        self.limit_R[slots] = torch.tensor([row.max_new_tokens for row in rows], device=self.device)
        if self.temperature:
            self.uniform_RN[slots] = uniforms([row.seed for row in rows], self.ids_RN.shape[1]).to(self.device)
        self._record(slots, self._prefill([tuple(row.prompt_ids) for row in rows], first))

    def _prefill(self, prompts: list[tuple[int, ...]], first: int) -> torch.Tensor:
        """Fills the slots from `first` on with the keys and values of `prompts` (sorted); their last logits [R, V]."""
        distinct = sorted(set(prompts))
        host = list(range(len(distinct)))
        for index in reversed(range(len(distinct) - 1)):
            nested = distinct[index + 1][: len(distinct[index])] == distinct[index]
            if nested and self.gates is None:  # prompts with gates of their own have keys of their own
                host[index] = host[index + 1]
        hosts = sorted(set(host))
        number = {prompt: index for index, prompt in enumerate(distinct)}
        logits: list[torch.Tensor | None] = [None] * len(prompts)
        for batch in micro_batches([len(distinct[index]) for index in hosts], PREFILL_TOKENS):
            members = {hosts[index]: place for place, index in enumerate(batch)}
            rows = [row for row, prompt in enumerate(prompts) if host[number[prompt]] in members]
            places = [members[host[number[prompts[row]]]] for row in rows]
            width = max(len(distinct[index]) for index in members)
            # Padding on the right needs no mask: in a causal model no real position sees what comes after it.
            ids_PT = torch.zeros(len(members), width, dtype=torch.long)
            for index, place in members.items():
                ids_PT[place, : len(distinct[index])] = torch.tensor(distinct[index])
            wanted = sorted({(place, len(prompts[row]) - 1) for row, place in zip(rows, places)})
            slots = [first + row for row in rows]
            if self.gates is not None:
                self._open_gates([distinct[index] for index in members], slots, places)
            cache = PrefillCache()
            flat = torch.tensor([place * width + column for place, column in wanted], device=self.device)
            logits_DV = logits_at(
                self.network, ids_PT.to(self.device), flat, use_cache=True, **{self.step.cache_name: cache}
            )
            order = {key: index for index, key in enumerate(wanted)}
            for row, place in zip(rows, places):
                logits[row] = logits_DV[order[place, len(prompts[row]) - 1]]
            self.step.admit(cache, slots, places, [len(prompts[row]) for row in rows])
        return torch.stack(logits)

    def _open_gates(self, prompts: list[tuple[int, ...]], slots: list[int], places: list[int]) -> None:
        """Sets the gates of a prefill pass over `prompts`; slot `slots[j]` keeps those of prompt `places[j]`."""
        gates = self.gates.of(prompts)
        for name, of_prompts in gates.items():
            if name not in self.gates_R:
                self.gates_R[name] = of_prompts.new_zeros(self.slots, *of_prompts.shape[1:])
                self.tables.append(self.gates_R[name])
            self.gates_R[name][slots] = of_prompts[places]
        self.gates.set(gates)

    def _record(self, slots: slice, logits_RV: torch.Tensor) -> None:
        """Samples one token for each of these rows and notes it."""
        counts_R1 = self.count_R[slots, None]
        uniform_R = self.uniform_RN[slots].gather(1, counts_R1)[:, 0] if self.temperature else None
        tokens_R, logprobs_R = sample(logits_RV, self.temperature, uniform_R)
        self.last_R[slots] = tokens_R
        self.ids_RN[slots].scatter_(1, counts_R1, tokens_R[:, None])
        self.logprobs_RN[slots].scatter_(1, counts_R1, logprobs_R[:, None])
        counts_R1 += 1
        ended_R = torch.where(self.count_R[slots] >= self.limit_R[slots], LENGTH, RUNNING)
        ended_R = torch.where(self.ends_V[tokens_R], EOS, ended_R)
        self.reason_R[slots] = torch.where(logprobs_R.isfinite(), ended_R, ERROR)
        if self.stop_strings:
            self._look_for_stop_strings(range(slots.start, slots.stop))

    def _look_for_stop_strings(self, slots: Sequence[int]) -> None:
        """Marks rows whose newest tokens complete a stop string. A string of n bytes lies within the last n tokens."""
        tail = max(len(text.encode()) for text in self.stop_strings) + STOP_STRING_TAIL
        for slot in slots:
            if self.reason_R[slot] in (RUNNING, LENGTH):
                count = int(self.count_R[slot])
                text = decode(self.tokenizer, self.ids_RN[slot, max(0, count - tail) : count].tolist())
                if any(stop in text for stop in self.stop_strings):
                    self.reason_R[slot] = STOP_STRING

    def _retire(self) -> None:
        """Takes ended rows out and moves live ones from the back into their slots."""
        ended_R = self.reason_R[: self.live] != RUNNING
        if not bool(ended_R.any()):
            return
        gone = ended_R.nonzero()[:, 0]
        self._hand_over(gone)
        bad = gone[self.reason_R[gone] == ERROR]
        if len(bad):
            self.step.clear(bad)
        live = self.live - len(gone)
        holes_R = gone[gone < live]
        movers_R = live + (~ended_R[live:]).nonzero()[:, 0]
        if len(holes_R):
            for stored in self.tables:
                stored[holes_R] = stored[movers_R]
            self.step.move(movers_R, holes_R)
        self.live = live
        self.step.shrink(self.position_R[:live])

    def _hand_over(self, slots_R: torch.Tensor) -> None:
        """Makes the outputs of these slots' rows."""
        columns = (self.request_R, self.count_R, self.reason_R, self.ids_RN, self.logprobs_RN)
        for index, count, reason, ids, logprobs in zip(*(column[slots_R].tolist() for column in columns)):
            kept = count - 1 if reason == ERROR else count
            self.outputs[index] = RolloutOutput(ids[:kept], logprobs[:kept], REASONS[reason])
