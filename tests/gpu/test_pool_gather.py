"""Pages of a pool on a real GPU, gathered as they are and in other formats: what a pool on the host gives."""

from __future__ import annotations

import itertools

import pytest
import torch

from triptych.core.kv_format import KvDtype, PageFormat
from triptych.kv.pages import TokenRun
from triptych.kv.pool import PoolPages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU"),
    pytest.mark.timeout(120),
]
FORMATS = [PageFormat(*form) for form in itertools.product((8, 16, 24, 32), (KvDtype.FLOAT32, KvDtype.BFLOAT16))]


def test_a_gpu_gathers_what_the_host_does() -> None:
    torch.manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        pool = torch.randn(3, 2, 40, 4, 16, 64).to(dtype)
        host, device = PoolPages(pool), PoolPages(pool.cuda())
        pages = torch.randperm(40)[:20].tolist()
        assert (host.gather(pages) == device.gather(pages)).all()
        for form, first in itertools.product(FORMATS, (0, 8)):
            run = TokenRun(pages, first, 20 * 16 - first - 3)
            if first % form.page_tokens and form.page_tokens > 8:
                continue
            num_bytes = run.num_tokens // form.page_tokens * host.layout.in_format(form).page_bytes
            ours, theirs = (source.gather_tokens(run, form) for source in (host, device))
            assert theirs.is_cuda
            assert torch.equal(ours.reshape(-1)[:num_bytes], theirs.cpu().reshape(-1)[:num_bytes])
