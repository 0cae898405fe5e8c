"""Two tenants of one cluster, started by `triptych up` with keys: neither finds what the other's prompts left."""

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
    environ = {"TRIPTYCH_API_KEYS": ",".join(f"{name}:{key}" for name, key in KEYS.items())}
    with launched(tmp_path, "--model", str(demo_model_dir()), "--topology", "mono", environ=environ) as launcher:
        url = launcher.wait_ready(120)["url"]
        content = [picture(), {"type": "text", "text": "what is it?"}]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]

        def asked(tenant: str, **fields: Any) -> tuple[str, int]:
            """The answer, and the tokens that were cached."""
            headers = {"authorization": f"Bearer {KEYS[tenant]}"}
            body = {"messages": messages, "max_tokens": 8, **fields}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
            return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert httpx.post(f"{url}/v1/chat/completions", json={}, timeout=10).status_code == 401
        text, cached = asked("acme")
        assert cached == 0
        assert asked("beta") == (text, 0)
        assert asked("acme", cache_salt="mine") == (text, 0)
        for tenant in KEYS:
            again, cached = asked(tenant)
            assert again == text and cached > 0, "its own it finds"
        assert asked("acme", cache_salt="mine")[1] > 0
