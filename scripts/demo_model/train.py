"""Trains the demo model from nothing on a CPU: `python -m scripts.demo_model.train --out DIR --budget-minutes N`.

Two phases: the vision tower alone on a label for each picture token, then everything jointly on branch-packed
questions. Each has a number of steps and a share of the wall time; the learning rate follows whichever is spent
further, so a slower machine makes fewer steps but still ends at a low rate, in time. `DIR/export` can be loaded at
any time; `DIR/checkpoint` lets the same command continue after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Qwen2_5_VLForConditionalGeneration

from scripts.demo_model import config as configs
from scripts.demo_model import tokenizer as tokenizers_of_ours
from scripts.demo_model.export import export
from scripts.demo_model.forward import embed, encode_pictures, run_language
from scripts.demo_model.pack import Batch, Pictures, Writer, training_batch, vision_batch
from scripts.demo_model.scenes import CLASSES, COLOURS

TIME_SHARES = {"vision": 0.15, "joint": 0.85}
HELPER_WEIGHT = 0.5
BACKGROUND_WEIGHT = 0.3
TAP_LAYER = 1
MOST_PICTURES = 4
AVERAGE_DECAY = 0.99
CHECKPOINT_EVERY_SECONDS = 240.0
LOG_EVERY_STEPS = 20
LOOK_EVERY_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates, warm-up in steps, and the share of the peak that is left at the end."""

    muon: float
    adam: float
    warmup_steps: int
    floor: float


VISION_RATES = Rates(3e-3, 3e-3, 60, 0.25)
JOINT_RATES = Rates(2.5e-3, 2e-3, 80, 0.005)


@dataclass(slots=True)
class Progress:
    """What has been done; saved beside the weights so that a run can go on."""

    seed: int
    phase: str = "vision"
    step: int = 0
    phase_steps: int = 0
    phase_seconds: float = 0.0


class Helpers(nn.Module):
    """Heads that exist in training only: what a picture token shows, and where and in which picture it stands."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.colour = nn.Linear(width, 1 + len(COLOURS))
        self.shows = nn.Linear(width, 1 + len(CLASSES))
        self.row = nn.Linear(width, 3)
        self.column = nn.Linear(width, 3)
        self.picture = nn.Linear(width, MOST_PICTURES)


class Batches(IterableDataset[Batch]):
    """Joint batches from step `first` on, made in a worker process."""

    def __init__(self, writer: Writer, seed: int, first: int) -> None:
        self.writer, self.seed, self.first = writer, seed, first

    def __iter__(self) -> Iterator[Batch]:
        step = self.first
        while True:
            yield training_batch(self.writer, self.seed, step)
            step += 1


class PictureBatches(IterableDataset[Pictures]):
    """Batches of the vision-only phase from step `first` on."""

    def __init__(self, seed: int, first: int) -> None:
        self.seed, self.first = seed, first

    def __iter__(self) -> Iterator[Pictures]:
        step = self.first
        while True:
            yield vision_batch(self.seed, step)
            step += 1


def initialise(model: nn.Module, layers: int) -> None:
    """Fan-in scaled weights; what is added to the residual stream starts smaller the more layers add to it."""
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            nn.init.constant_(weight, 1.0 if "norm" in name or "ln_q" in name else 0.0)
        elif "embed_tokens" in name:
            nn.init.normal_(weight, std=0.06)
        else:
            adds = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight"))
            std = 0.8 / math.sqrt(weight[0].numel()) / (math.sqrt(2 * layers) if adds else 1.0)
            nn.init.normal_(weight, std=std)


class Trainer:
    """Owns the model, the optimisers and the running average of the weights, which is what gets exported."""

    def __init__(self, out: Path, seed: int, budget_seconds: float, steps: dict[str, int]) -> None:
        self.out, self.budget_seconds, self.steps = out, budget_seconds, steps
        self.most_threads = torch.get_num_threads()
        self.progress = Progress(seed)
        self.tokenizer = self._tokenizer(seed)
        torch.manual_seed(seed)
        self.model = Qwen2_5_VLForConditionalGeneration(configs.build(self.tokenizer))
        initialise(self.model, configs.TEXT_SIZES["num_hidden_layers"])
        self.helpers = Helpers(configs.TEXT_SIZES["hidden_size"])
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._new_optimisers(VISION_RATES)

    def _tokenizer(self, seed: int) -> Tokenizer:
        if not (self.out / "tokenizer.json").exists():
            tokenizers_of_ours.save(tokenizers_of_ours.build(seed), self.out)
        return tokenizers_of_ours.load(self.out)

    def _named(self) -> dict[str, nn.Parameter]:
        named = {f"model.{name}": p for name, p in self.model.named_parameters()}
        return named | {f"helpers.{name}": p for name, p in self.helpers.named_parameters()}

    def _new_optimisers(self, rates: Rates) -> None:
        """Muon for the matrices of the blocks, AdamW for embeddings, norms, biases and the helper heads."""
        self.rates = rates
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in self._named().items():
            is_matrix = parameter.ndim == 2 and name.startswith("model.") and "embed_tokens" not in name
            (matrices if is_matrix else rest).append(parameter)
        self.muon = torch.optim.Muon(
            matrices, lr=rates.muon, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        self.adam = torch.optim.AdamW(rest, lr=rates.adam, betas=(0.9, 0.98), weight_decay=0.0)

    # -- one step ---------------------------------------------------------------------------------------------

    def spent(self) -> float:
        """How much of the phase is over, from 0 to 1, by steps or by time."""
        progress = self.progress
        by_time = progress.phase_seconds / (self.budget_seconds * TIME_SHARES[progress.phase])
        return min(1.0, max(by_time, progress.phase_steps / self.steps[progress.phase]))

    def _set_rates(self) -> None:
        spent = self.spent()
        warm = min(1.0, (self.progress.phase_steps + 1) / self.rates.warmup_steps)
        scale = warm * (self.rates.floor + (1 - self.rates.floor) * 0.5 * (1 + math.cos(math.pi * spent)))
        for optimiser, peak in ((self.muon, self.rates.muon), (self.adam, self.rates.adam)):
            for group in optimiser.param_groups:
                group["lr"] = peak * scale

    def update(self, loss: Tensor) -> None:
        """Applies the gradient of `loss` and moves the running average."""
        self.muon.zero_grad()
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(list(self._named().values()), 1.0)
        self._set_rates()
        self.muon.step()  # type: ignore[no-untyped-call]
        self.adam.step()
        current = [p.detach() for p in self.model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), current, 1 - AVERAGE_DECAY)

    def vision_loss(self, pictures: Pictures) -> tuple[Tensor, dict[str, float]]:
        tokens = encode_pictures(self.model.model.visual, pictures.patches, pictures.grid)
        return self._token_loss(tokens, pictures)

    def _token_loss(self, tokens: Tensor, pictures: Pictures) -> tuple[Tensor, dict[str, float]]:
        shows = self.helpers.shows(tokens).flatten(0, 1)
        colour = self.helpers.colour(tokens).flatten(0, 1)
        classes, colours = pictures.classes.flatten(), pictures.colours.flatten()
        seen = classes > 0
        weight = torch.where(seen, 1.0, BACKGROUND_WEIGHT)
        loss = F.cross_entropy(shows, classes, reduction="none") + F.cross_entropy(colour, colours, reduction="none")
        loss = (loss * weight).sum() / weight.sum()
        right = (shows.argmax(-1) == classes)[seen].float().mean()
        hue = (colour.argmax(-1) == colours)[seen].float().mean()
        return loss, {"tokens": loss.item(), "class": right.item(), "colour": hue.item()}

    def joint_loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        visual, language = self.model.model.visual, self.model.model.language_model
        tokens = [encode_pictures(visual, p.patches, p.grid) for p in batch.pictures]
        hidden, tapped = run_language(language, embed(language, batch, tokens), batch, TAP_LAYER)
        loss, facts = self._answer_loss(hidden, batch)
        helper, _ = self.vision_loss(batch.digits)
        for picture_tokens, pictures in zip(tokens, batch.pictures, strict=True):
            helper = helper + self._token_loss(picture_tokens, pictures)[0] / len(tokens)
        if tokens:
            helper = helper + self._place_loss(tapped[batch.is_picture], batch)
        return loss + HELPER_WEIGHT * helper, facts

    def _answer_loss(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        asked = batch.targets >= 0
        targets, weights = batch.targets[asked], batch.weights[asked]
        logits = F.linear(hidden[asked], self.model.model.language_model.embed_tokens.weight)
        losses = F.cross_entropy(logits, targets, reduction="none")
        informative = weights > 0.99
        right = (logits.argmax(-1) == targets)[informative].float().mean()
        loss = (losses * weights).sum() / weights.sum()
        return loss, {"answer": loss.item(), "right": right.item(), "pictures": len(batch.pictures)}

    def _place_loss(self, tapped: Tensor, batch: Batch) -> Tensor:
        rows, columns, numbers = (torch.cat(parts) for parts in zip(*_places(batch.pictures), strict=True))
        count = batch.ids.shape[0]
        return (
            F.cross_entropy(self.helpers.row(tapped), rows.repeat(count))
            + F.cross_entropy(self.helpers.column(tapped), columns.repeat(count))
            + F.cross_entropy(self.helpers.picture(tapped), numbers.repeat(count))
        )

    # -- the run ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        if self.progress.phase == "vision":
            if self.spent() < 1:
                self._run_phase(PictureBatches(self.progress.seed, self.progress.step), self.vision_loss)
            seed, step = self.progress.seed, self.progress.step
            self.progress = Progress(seed, "joint", step)
            self._new_optimisers(JOINT_RATES)
        batches = Batches(Writer(self.tokenizer), self.progress.seed, self.progress.step)
        self._run_phase(batches, self.joint_loss)

    def _run_phase(self, batches: IterableDataset[Any], loss_of: Any) -> None:
        loader = DataLoader(batches, batch_size=None, num_workers=1, prefetch_factor=8)
        before = saved = time.monotonic()
        log = Log()
        threads = Threads(self.most_threads)
        for batch in loader:
            threads.adapt()
            loss, facts = loss_of(batch)
            self.update(loss)
            now = time.monotonic()
            self.progress.step += 1
            self.progress.phase_steps += 1
            self.progress.phase_seconds += now - before
            log.add(self.progress, now - before, facts)
            before = now
            done = self.spent() >= 1
            if done or now - saved > CHECKPOINT_EVERY_SECONDS:
                self.save()
                saved = time.monotonic()
            if done:
                return

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes checkpoint and export beside the old ones, then puts them in their place."""
        fresh = self.out / "checkpoint.new"
        fresh.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().clone() for name, p in self._named().items()}
        save_file(weights, fresh / "weights.safetensors")
        save_file({n: t.clone() for n, t in self.average.items()}, fresh / "average.safetensors")
        save_file(self._optimiser_tensors(), fresh / "optimisers.safetensors")
        (fresh / "progress.json").write_text(json.dumps(asdict(self.progress)) + "\n")
        _replace(fresh, self.out / "checkpoint")
        export(self.model, self.average, self.tokenizer, self.out / "export.new")
        _replace(self.out / "export.new", self.out / "export")

    def _optimiser_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in self._named().items():
            state = self.muon.state.get(parameter) or self.adam.state.get(parameter) or {}
            tensors.update({f"{name}:{key}": value.detach().clone() for key, value in state.items()})
        return tensors

    def resume(self) -> None:
        """Continues from `DIR/checkpoint`."""
        kept = self.out / "checkpoint"
        self.progress = Progress(**json.loads((kept / "progress.json").read_text()))
        self._new_optimisers(VISION_RATES if self.progress.phase == "vision" else JOINT_RATES)
        weights, average = load_file(kept / "weights.safetensors"), load_file(kept / "average.safetensors")
        optimiser_tensors = load_file(kept / "optimisers.safetensors")
        with torch.no_grad():
            for name, parameter in self._named().items():
                parameter.copy_(weights[name])
        for name, tensor in self.average.items():
            tensor.copy_(average[name])
        for key, value in optimiser_tensors.items():
            name, field = key.rsplit(":", 1)
            parameter = self._named()[name]
            owner = self.muon if field == "momentum_buffer" else self.adam
            owner.state[parameter][field] = value


def _places(pictures: tuple[Pictures, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each picture of a row: every token's third of the height, third of the width, and picture number."""
    for number, picture in enumerate(pictures):
        rows, columns = picture.grid
        r, c = torch.arange(rows) * 3 // rows, torch.arange(columns) * 3 // columns
        yield r.repeat_interleave(columns), c.repeat(rows), torch.full((rows * columns,), number)


class Threads:
    """Gives up a thread while others need the machine.

    Threads of one operation wait for each other, so a thread that has to share its core holds up all of them.
    """

    def __init__(self, most: int) -> None:
        self.most, self.looked, self.before = most, time.monotonic(), self._others_seconds()

    def adapt(self) -> None:
        now = time.monotonic()
        if now - self.looked < LOOK_EVERY_SECONDS:
            return
        others = self._others_seconds()
        busy_cores = (others - self.before) / (now - self.looked)
        torch.set_num_threads(min(self.most, max(1, self.most - math.ceil(busy_cores - 0.4))))
        self.looked, self.before = now, others

    @staticmethod
    def _others_seconds() -> float:
        """Processor time that other processes have used since the machine started; 0 where that is not told."""
        if not Path("/proc/stat").exists():
            return 0.0
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:4]]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") - time.process_time()


def _replace(fresh: Path, old: Path) -> None:
    if old.exists():
        shutil.rmtree(old)
    fresh.rename(old)


class Log:
    """One JSON line on standard output every `LOG_EVERY_STEPS` steps, with means since the last one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.facts: list[dict[str, float]] = []

    def add(self, progress: Progress, seconds: float, facts: dict[str, float]) -> None:
        self.seconds.append(seconds)
        self.facts.append(facts)
        if progress.phase_steps % LOG_EVERY_STEPS == 0:
            means = {key: _mean([f[key] for f in self.facts]) for key in self.facts[0]}
            line = {
                "phase": progress.phase,
                "step": progress.phase_steps,
                "minutes": progress.phase_seconds / 60,
            }
            line |= {"step_seconds": _mean(self.seconds), "threads": torch.get_num_threads(), **means}
            sys.stdout.write(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}))
            sys.stdout.write("\n")
            sys.stdout.flush()
            self.seconds, self.facts = [], []


def _mean(values: list[float]) -> float:
    values = [v for v in values if not math.isnan(v)]
    return sum(values) / max(1, len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, export and tokenizer")
    parser.add_argument("--budget-minutes", type=float, default=110.0, help="wall time for both phases together")
    parser.add_argument("--vision-steps", type=int, default=2400, help="steps of the vision-only phase")
    parser.add_argument("--joint-steps", type=int, default=4500, help="steps of the joint phase")
    parser.add_argument("--seed", type=int, default=0, help="run of training seeds; evaluation seeds are others")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    steps = {"vision": options.vision_steps, "joint": options.joint_steps}
    trainer = Trainer(options.out, options.seed, options.budget_minutes * 60, steps)
    if (options.out / "checkpoint" / "progress.json").exists():
        trainer.resume()
    trainer.run()


if __name__ == "__main__":
    main()
