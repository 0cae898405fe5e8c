"""Two tenants of one cluster, started by `triptych up` with keys: neither finds what the other's prompts left, whatever
it names its pictures by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.launching import launched
from tests.unit.demo_dir import demo_model_dir
from tests.unit.router_house import picture

KEYS = {"acme": "tk-of-acme-0123456789", "beta": "tk-of-beta-0123456789"}
SYSTEM = "Answer with one word, and never with more than that, whatever the question after this sentence may be. " * 2


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_tenants_never_hit_each_others_entries(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f"[tenants.{name}]\nkeys = ['{key}']\nis_trusted = true\n" for name, key in KEYS.items()))
    environ = {"TRIPTYCH_API_KEYS_FILE": str(keys)}
    with launched(tmp_path, "--model", str(demo_model_dir()), "--topology", "mono", environ=environ) as launcher:
        url = launcher.wait_ready(120)["url"]
        content = [picture(), {"type": "text", "text": "what is it?"}]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]

        def answer(tenant: str, **fields: Any) -> Any:
            headers = {"authorization": f"Bearer {KEYS[tenant]}", "x-triptych-timeline": "1"}
            body = {"messages": messages, "max_tokens": 8, **fields}
            return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()

        def asked(tenant: str, **fields: Any) -> tuple[str, int]:
            """The answer, and the tokens that were cached."""
            found = answer(tenant, **fields)
            return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

        def counted(tenant: str, **fields: Any) -> tuple[int, int]:
            """The tokens that were cached, and the pictures that were encoded."""
            found = answer(tenant, **fields)
            events = [row["event"] for row in found["triptych"]["timeline"]]
            return found["usage"]["prompt_tokens_details"]["cached_tokens"], events.count("encode")

        assert httpx.post(f"{url}/v1/chat/completions", json={}, timeout=10).status_code == 401
        text, cached = asked("acme")
        assert cached == 0
        assert asked("beta") == (text, 0)
        assert asked("acme", cache_salt="mine") == (text, 0)
        for tenant in KEYS:
            again, cached = asked(tenant)
            assert again == text and cached > 0, "its own it finds"
        assert asked("acme", cache_salt="mine")[1] > 0

        named: dict[str, Any] = {"mm_hashes": ["ab" * 32]}
        for salt in ({"cache_salt": "new"}, {"cache_salt": "newer"}):
            for tenant in KEYS:
                assert counted(tenant, **named, **salt) == (0, 1), "one hash, and nobody's but its own"
        for tenant in KEYS:
            cached, num_encoded = counted(tenant, **named, cache_salt="new")
            assert cached > 0 and num_encoded == 0, "its own it finds"
            messages[1]["content"] = [picture(kind="JPEG"), content[1]]
            assert counted(tenant, **named, cache_salt="new") == (cached, 0), "in whatever encoding"
            messages[1]["content"] = content
