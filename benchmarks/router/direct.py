"""A client that asks the fakes itself, as the router would: what is left of a request's time without a router."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, cast

from triptych.core.ids import AttemptRef
from triptych.core.plan import IDENTITY_BYTES, Grid, Item, Modality, Plan, Sampling, TokenRange
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc import client, convert
from triptych.rpc.client import ChannelPool
from triptych.wire.v1 import decode_pb2, encoder_pb2, prefill_pb2

PROMPT_IDS = tuple(range(3, 303))
PICTURE_TOKENS = 64
PICTURE = bytes(150_000)


class Direct:
    """Takes turns between the workers of each stage. `with_picture`: each request has one, never the same twice."""

    def __init__(self, addresses: dict[str, str], token: str | None, max_tokens: int, *, with_picture: bool) -> None:
        self._channels = ChannelPool(token)
        self._workers = {
            role: [_info(name, address) for name, address in addresses.items() if name.startswith(role.value)]
            for role in Role
        }
        self._max_tokens = max_tokens
        self._with_picture = with_picture

    async def ask(self, number: int) -> tuple[float, float]:
        """Seconds to the first token and to the end of the answer."""
        decode, prefill, encoder = (
            self._workers[role][number % len(self._workers[role])] for role in (Role.DECODE, Role.PREFILL, Role.ENCODER)
        )
        ref = convert.ref_to_proto(AttemptRef(f"direct-{os.urandom(8).hex()}"))
        plan = convert.plan_to_proto(self._plan())
        start_s = time.perf_counter()
        generate: Any = client.decode_stub(self._channels, decode).Generate(
            decode_pb2.GenerateRequest(ref=ref, plan=plan), timeout=60
        )
        granted = (await generate.read()).granted
        request = prefill_pb2.PrefillRequest(ref=ref, plan=plan, grant=granted)
        call: Any = client.prefill_stub(self._channels, prefill).Prefill(request, timeout=60)
        encode = asyncio.create_task(self._encode(ref, plan, encoder, prefill)) if self._with_picture else None
        while (await call.read()).WhichOneof("kind") != "first_token":
            pass
        first_s = time.perf_counter() - start_s
        while (await generate.read()).WhichOneof("kind") != "generate_done":
            pass
        if encode is not None:
            await encode
        call.cancel()
        generate.cancel()
        return first_s, time.perf_counter() - start_s

    def _plan(self) -> Plan:
        sampling = Sampling(max_tokens=self._max_tokens)
        if not self._with_picture:
            return Plan(compact_ids=PROMPT_IDS, items=(), sampling=sampling, timeout_s=60.0)
        item = Item(
            modality=Modality.IMAGE,
            identity=os.urandom(IDENTITY_BYTES),
            num_tokens=PICTURE_TOKENS,
            ranges=(TokenRange(4, 4, PICTURE_TOKENS),),
            grid=Grid(1, 16, 16),
            media_bytes=len(PICTURE),
            width_px=224,
            height_px=224,
        )
        return Plan(compact_ids=PROMPT_IDS[:40], items=(item,), sampling=sampling, timeout_s=60.0)

    async def _encode(self, ref: Any, plan: Any, encoder: WorkerInfo, prefill: WorkerInfo) -> None:
        call = cast(Any, client.encoder_stub(self._channels, encoder)).Encode(timeout=60)
        start = encoder_pb2.EncodeStart(
            ref=ref,
            prefill_worker_id=prefill.worker_id,
            prefill_epoch=prefill.epoch,
            items=[encoder_pb2.EncodeItem(item_index=0, item=plan.items[0])],
            timeout_ms=60_000,
        )
        await call.write(encoder_pb2.EncodeRequest(start=start))
        while (kind := (message := await call.read()).WhichOneof("kind")) != "encode_done":
            if kind == "need_bytes":
                chunk = encoder_pb2.MediaChunk(item_index=message.need_bytes.item_index, offset=0, data=PICTURE)
                await call.write(encoder_pb2.EncodeRequest(chunk=chunk))


def _info(worker_id: str, address: str) -> WorkerInfo:
    return WorkerInfo(worker_id, 1, frozenset(Role), WorkerState.READY, address)
