"""`transformers`' own continuous batching, its prefix sharing on. It takes no pictures."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.engine.transformers_generate import Job

# Its defaults are sized for a GPU. On a CPU pages of 256 tokens, 8,192 tokens a step and blocks for all memory were
# slower in every cell that was tried: 5.7 tokens/s against 23 with these, 16 prompts at once.
PAGE_TOKENS = 32
NUM_BLOCKS = 512
STEP_TOKENS = 2048


class ContinuousEngine:
    """Owner of the manager and its thread."""

    def __init__(self, model: Any) -> None:
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=64, eos_token_id=-1, pad_token_id=0
        )
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=NUM_BLOCKS, max_batch_tokens=STEP_TOKENS, allow_block_sharing=True
        )
        self._manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        self._count = 0

    def start(self) -> None:
        self._manager.start()

    def submit(self, job: Job) -> None:
        """On the event loop: results come back to it. Raises ValueError for a prompt with pictures."""
        if job.prompt.pictures:
            raise ValueError("continuous batching takes no pictures")
        self._count += 1
        name = f"request-{self._count}"
        told = 0

        def on_result(result: Any) -> None:
            nonlocal told
            for token in result.generated_tokens[told:]:
                job.on_token(token)
            told = len(result.generated_tokens)
            if result.is_finished():
                job.on_token(None)

        self._manager.register_result_handler(name, on_result)
        self._manager.add_request(
            list(job.prompt.ids),
            request_id=name,
            max_new_tokens=job.max_tokens,
            streaming=True,
            eos_token_id=-1,
        )
