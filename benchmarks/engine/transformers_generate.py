"""`transformers.generate` as well as one can serve with it: requests that come together are one batch, and the KV of
earlier prompts is kept and given to `generate` as its cache, which is the library's own recipe for shared prefixes.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.engine.transformers_prompt import Prompt

GATHER_SECONDS = 0.1
MAX_BATCH = 16
KEPT_PROMPTS = 4
# Less is not worth the copy.
LEAST_SHARED = 16

OnToken = Callable[[int | None], None]


@dataclass(frozen=True, slots=True)
class Job:
    """`on_token` gets each id, and None after the last. `batch_hint`: how many come at the same time."""

    prompt: Prompt
    max_tokens: int
    batch_hint: int
    on_token: OnToken


class GenerateEngine:
    """Owner of the model and of the kept prefixes, on a thread of its own once it was started.

    Attributes:
        num_reused_tokens: prompt tokens that were not computed again, over all answers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._kept: OrderedDict[tuple[int | str, ...], Any] = OrderedDict()
        self.num_reused_tokens = 0

    def start(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            batch = self._gather()
            with torch.inference_mode():
                self.answer(batch)

    def _gather(self) -> list[Job]:
        """One job, and those that are said to come with it: nobody waits who comes alone."""
        batch = [self._jobs.get()]
        until = time.monotonic() + GATHER_SECONDS
        while len(batch) < min(batch[0].batch_hint, MAX_BATCH):
            try:
                batch.append(self._jobs.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
        return batch

    def answer(self, batch: Sequence[Job]) -> None:
        """In inference mode. A failure ends the thread: the server is then of no use, and its clients time out."""
        prompts = [job.prompt for job in batch]
        shared, cache = self._prefix(prompts)
        self.num_reused_tokens += shared * len(prompts)
        inputs = batch_inputs(prompts, shared)
        if cache is not None:
            inputs["cache"] = cache
        longest = max(job.max_tokens for job in batch)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=longest, eos_token_id=None, pad_token_id=0
        )
        config.return_dict_in_generate = True
        if hasattr(self._model.model, "rope_deltas"):
            self._model.model.rope_deltas = None
        out = self._model.generate(**inputs, generation_config=config, streamer=_Fan(batch))
        self._keep(prompts, out)

    def _prefix(self, prompts: Sequence[Prompt]) -> tuple[int, Any]:
        """How many first rows of all prompts are kept, and a cache of them for the batch; the last row is computed."""
        best, length = None, LEAST_SHARED - 1
        for keys in self._kept:
            same = min(_common(keys, prompt.keys[:-1]) for prompt in prompts)
            if same > length:
                best, length = keys, same
        if best is None:
            return 0, None
        self._kept.move_to_end(best)
        cache = copy.deepcopy(self._kept[best])
        cache.crop(length - cache.get_seq_length())
        if len(prompts) > 1:
            cache.batch_repeat_interleave(len(prompts))
        return length, cache

    def _keep(self, prompts: Sequence[Prompt], out: Any) -> None:
        """The longest prompt's rows: it alone has no padding among them."""
        row = max(range(len(prompts)), key=lambda index: len(prompts[index].ids))
        keys = prompts[row].keys
        cache: Any = out.cache if hasattr(out, "cache") else out.past_key_values
        cache.batch_select_indices(torch.tensor([row]))
        cache.crop(len(keys) - cache.get_seq_length())
        self._kept[keys] = cache
        while len(self._kept) > KEPT_PROMPTS:
            self._kept.popitem(last=False)


class _Fan(BaseStreamer):
    """Hands each step's ids, (batch,), to their jobs. The first thing that `generate` puts is the prompt."""

    def __init__(self, batch: Sequence[Job]) -> None:
        self._batch = batch
        self._count = -1

    def put(self, value: torch.Tensor) -> None:
        self._count += 1
        if self._count:
            for job, token in zip(self._batch, value.tolist(), strict=True):
                if self._count <= job.max_tokens:
                    job.on_token(token)
                if self._count == job.max_tokens:
                    job.on_token(None)

    def end(self) -> None:
        pass


def batch_inputs(prompts: Sequence[Prompt], shared: int) -> dict[str, Any]:
    """What `generate` takes for prompts whose first `shared` rows are cached: the padding stands between those rows and
    the rest, masked, so that all prompts end in the same column."""
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.ones_like(ids)
    first = prompts[0].positions
    positions = torch.zeros(*first.shape[:-1], len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        gap = width - len(prompt.ids)
        ids[row, :shared] = torch.tensor(prompt.ids[:shared])
        ids[row, shared + gap :] = torch.tensor(prompt.ids[shared:])
        mask[row, shared : shared + gap] = 0
        positions[..., row, :shared] = prompt.positions[..., :shared]
        positions[..., row, shared + gap :] = prompt.positions[..., shared:]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    pictures = [picture for prompt in prompts for picture in prompt.pictures if picture[0] >= shared]
    if pictures:
        inputs["pixel_values"] = torch.cat([patches for _, patches, _ in pictures])
        inputs["image_grid_thw"] = torch.cat([grid for _, _, grid in pictures])
    return inputs


def _common(left: Sequence[int | str], right: Sequence[int | str]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
