"""Asks the demo model fresh questions and judges its answers.

    python scripts/eval_demo_model.py --json PATH --seed N --per-type 500 [--url URL | --local DIR]

With `--url` a running server is asked over the OpenAI-compatible API; with `--local` a checkpoint directory is
asked through stock `transformers`; with neither a cluster is started on this machine and stopped at the end.
Exit status 0 means that every bar is met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.cluster import running_cluster
from scripts.demo_model.exam import Question, failures, make_exam, messages, report

MAX_TOKENS = 64
CONCURRENCY = 8
REQUEST_SECONDS = 120.0
BUSY_STATUSES = (429, 503)
BUSY_TRIES = 20
PROGRESS_EVERY = 500


class Respondent(Protocol):
    """Something that can be asked."""

    def ask_all(self, questions: Sequence[Question]) -> list[str]:
        """The answers, in the order of the questions."""
        ...


class HttpRespondent:
    """A server with the OpenAI chat API; several requests are in flight at a time."""

    def __init__(self, url: str, concurrency: int) -> None:
        self.url, self.concurrency = url.rstrip("/"), concurrency

    def ask_all(self, questions: Sequence[Question]) -> list[str]:
        return asyncio.run(self._ask_all(questions))

    async def _ask_all(self, questions: Sequence[Question]) -> list[str]:
        places = asyncio.Semaphore(self.concurrency)
        answers = [""] * len(questions)
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_SECONDS) as client:
            model = await _model_name(client)

            async def ask(number: int) -> None:
                async with places:
                    answers[number] = await _ask(client, model, questions[number])
                    _progress(number + 1, len(questions))

            async with asyncio.TaskGroup() as group:
                for number in range(len(questions)):
                    group.create_task(ask(number))
        return answers


async def _model_name(client: httpx.AsyncClient) -> str:
    found = await client.get("/v1/models")
    found.raise_for_status()
    return str(found.json()["data"][0]["id"])


async def _ask(client: httpx.AsyncClient, model: str, question: Question) -> str:
    """The answer to one question; a server that says it is busy is asked again after a while."""
    body = {"model": model, "messages": messages(question), "temperature": 0, "max_tokens": MAX_TOKENS}
    for attempt in range(BUSY_TRIES):
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code not in BUSY_STATUSES:
            break
        await asyncio.sleep(0.2 * (attempt + 1))
    if response.status_code != 200:
        raise RuntimeError(f"the server answered {response.status_code}: {response.text[:300]}")
    return str(response.json()["choices"][0]["message"]["content"])


def _progress(done: int, total: int) -> None:
    if done % PROGRESS_EVERY == 0:
        sys.stderr.write(f"{done} of {total}\n")


class LocalRespondent:
    """A checkpoint directory, asked through stock `transformers` in float32, greedily."""

    def __init__(self, directory: Path, batch: int, threads: int) -> None:
        from scripts.demo_model.stock import StockModel

        self.model, self.batch = StockModel(directory, threads), batch

    def ask_all(self, questions: Sequence[Question]) -> list[str]:
        order = sorted(range(len(questions)), key=lambda n: _cost(questions[n]))
        answers = [""] * len(questions)
        for start in range(0, len(order), self.batch):
            chunk = order[start : start + self.batch]
            said = self.model.answer([messages(questions[n]) for n in chunk], MAX_TOKENS)
            for number, answer in zip(chunk, said, strict=True):
                answers[number] = answer
        return answers


def _cost(question: Question) -> tuple[int, int, int]:
    """Orders questions so that those of about equal length are answered together."""
    tokens = sum(scene.grid[0] * scene.grid[1] for scene in question.scenes)
    return len(question.truth) // 12, len(question.noise_seeds), tokens


def judge(respondent: Respondent, seed: int, per_type: int) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The results, and the wrong answers for whoever wants to know why."""
    exam = make_exam(seed, per_type)
    questions = exam.questions()
    answers = dict(zip(questions, respondent.ask_all(questions), strict=True))
    wrong = [
        {
            "kind": q.kind,
            "question": q.turn.question,
            "truth": q.truth,
            "answer": said,
            "blind": str(bool(q.noise_seeds)),
        }
        for q, said in answers.items()
        if not q.is_right(said)
    ]
    return report(exam, answers, seed), wrong


def table(results: dict[str, Any]) -> str:
    """The results for people to read."""
    lines = [f"{'type':<22}{'accuracy':>9}{'n':>6}{'blind':>8}{'chance':>8}"]
    for kind, got in results["types"].items():
        blind = results["blind"][kind]
        lines.append(f"{kind:<22}{got['accuracy']:>9.3f}{got['n']:>6}{blind['accuracy']:>8.3f}{blind['chance']:>8.3f}")
    lines += [
        f"{kind:<22}{got['accuracy']:>9.3f}{got['n']:>6}" for kind, got in (results["text"] | results["forms"]).items()
    ]
    swap = results["swap"]
    return "\n".join([*lines, f"{'swapped pictures flip':<22}{swap['flipped']:>9.3f}{swap['n']:>6}"])


def _judge_chosen(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, str]]]:
    if options.local:
        local = LocalRespondent(options.local, options.batch, options.threads)
        return judge(local, options.seed, options.per_type)
    if options.url:
        return judge(HttpRespondent(options.url, options.concurrency), options.seed, options.per_type)
    with running_cluster("--topology", "e-p-d") as url:
        return judge(HttpRespondent(url, options.concurrency), options.seed, options.per_type)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--seed", type=int, default=0, help="run of evaluation seeds")
    parser.add_argument("--per-type", type=int, default=500)
    parser.add_argument("--url", help="a running server, for example http://127.0.0.1:8000")
    parser.add_argument("--local", type=Path, help="a checkpoint directory")
    parser.add_argument("--wrong", type=Path, help="where wrong answers are written, one JSON value a line")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="requests in flight")
    parser.add_argument("--batch", type=int, default=16, help="questions at a time with --local")
    parser.add_argument("--threads", type=int, default=2, help="threads with --local")
    options = parser.parse_args()
    results, wrong = _judge_chosen(options)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.wrong:
        options.wrong.write_text("".join(json.dumps(line) + "\n" for line in wrong))
    missed = failures(results)
    sys.stdout.write("\n".join([table(results), *missed, "passed" if not missed else "not passed"]) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
