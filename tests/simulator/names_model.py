"""A model that computes names: it writes and reads every cache of a rank as layers do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tests.simulator.memory import StateMemory, TokenMemory
from tests.simulator.names import Text, token_after

from bt_builders import AttentionSetup, MambaMetadata
from bt_runner.arrays import Flags, Ints
from bt_runner.errors import VerificationError
from bt_runner.input_batch import InputBatch
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.models.step import ModelStep
from bt_runner.requests import Request
from bt_runner.sampler import Sampling
from bt_runner.scheduler import SchedulerOutput
from bt_tables import StepTables
from bt_width import BlockTableLayout


class Texts:
    """What the requests in all rows must come to be, shared by the ranks."""

    def __init__(self, max_num_reqs: int) -> None:
        """Know no request."""
        self._of_row: list[Text | None] = [None] * max_num_reqs

    def names(self, batch: SchedulerOutput, token_ids: Sequence[int]) -> list[Ints]:
        """Return the names of each request's tokens after a step, drafts included.

        Raises:
            VerificationError: A step computes a token that is not its request's own.
        """
        names, taken = [], 0
        for row, request, start, num_known, num_drafts in zip(
            batch.rows.tolist(),
            batch.requests,
            batch.starts.tolist(),
            batch.num_known.tolist(),
            batch.num_drafts.tolist(),
            strict=True,
        ):
            text, known = self._text(row, request), start + num_known
            if text.tokens[start:known] != token_ids[taken : taken + num_known]:
                raise VerificationError(
                    f"tokens {start} to {known - 1} of request {request.request_id} are others "
                    "than its own",
                    request=request.request_id,
                    position=start,
                )
            taken += num_known + num_drafts
            names.append(text.names_with(known, token_ids[taken - num_drafts : taken]))
        return names

    def _text(self, row: int, request: Request) -> Text:
        text = self._of_row[row]
        if text is None or text.request is not request:
            text = self._of_row[row] = Text(request)
        return text


class NamesModel:
    """Computes the name of each token, and checks that its request's caches hold what they must.

    Attributes:
        batch: The step that is computed; None while steps are captured.
        is_placed: By group that keeps tokens; which tokens of the last step lie on this rank.
    """

    def __init__(self, setup: AttentionSetup, kv: KVCacheManager, texts: Texts) -> None:
        """Start with empty caches."""
        self.batch: SchedulerOutput | None = None
        self.is_placed: dict[str, Flags] = {}
        self._texts = texts
        self._tokens: dict[str, TokenMemory] = {}
        self._states: dict[str, StateMemory] = {}
        self._group_names = [group.name for group in setup.groups]
        for group, pool in zip(setup.groups, kv.pools, strict=True):
            if group.layout.slot_mode == "none":
                self._states[group.name] = StateMemory(group.name, group.layout, pool)
            else:
                self._tokens[group.name] = TokenMemory(group.name, group.layout, pool)

    @property
    def token_layouts(self) -> dict[str, BlockTableLayout]:
        """The plans of the groups that keep tokens, by name."""
        return {name: memory.layout for name, memory in self._tokens.items()}

    def forget(self) -> None:
        """Trust nothing that was computed: a step failed."""
        for memory in (*self._tokens.values(), *self._states.values()):
            memory.forget()

    def check(self, batch: SchedulerOutput, inputs: InputBatch, tables: StepTables) -> None:
        """Note which step is computed next."""
        self.batch = batch

    def forward(self, step: ModelStep) -> list[torch.Tensor]:
        """Write and read all caches; return the name of each token, ``[T]`` int64.

        Raises:
            VerificationError: Something else lies where a token or a state is looked for.
        """
        stream = torch.zeros(len(step.token_ids), dtype=torch.int64, device=step.token_ids.device)
        batch = self.batch
        if batch is None:
            return [stream]
        names = self._texts.names(batch, step.token_ids.tolist())
        for name, states in self._states.items():
            built = step.groups[name].of(MambaMetadata)
            states.read(batch, built, names)
            states.write(batch, built, names)
        spans = zip(names, batch.starts.tolist(), strict=True)
        of_tokens = np.concatenate([of_text[start + 1 :] for of_text, start in spans])
        for name, tokens in self._tokens.items():
            slots = step.groups[name].common.slot_mapping[: len(of_tokens)]
            self.is_placed[name] = tokens.write(slots.cpu().numpy(), of_tokens)
        # as in a layer, what is read may be of this step
        for name, tokens in self._tokens.items():
            table = step.groups[name].common.block_table.cpu().numpy()
            tokens.read(batch, table, names)
        stream[: len(of_tokens)] = torch.from_numpy(of_tokens)
        return [stream]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the names that ``sample`` chooses after."""
        return hidden

    def sample(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """Return the token that follows each text."""
        return token_after(logits)

    def copy_blocks(self, group: int, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        """Copy states of a group."""
        states = self._states[self._group_names[group]]
        states.copy(source_ids.cpu().numpy(), target_ids.cpu().numpy())
