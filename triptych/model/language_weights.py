"""The weights of a checkpoint's language model, on their way into the part that computes with them: our own decoder
where it knows the family and the machine suits it, transformers' modules elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from triptych.core.errors import StartupError
from triptych.model.adapters.base import Adapter
from triptych.model.checkpoint_files import CONFIG_FILE
from triptych.model.decoder_builder import DecoderBuilder, Places
from triptych.model.linear import PACKED_DTYPES, Linear, make_linear
from triptych.model.loader import check_loaded, is_same_tensor, load_part, read_part, shapes_of
from triptych.model.own_language import Decoder, OwnLanguage
from triptych.model.parts import LanguagePart
from triptych.model.rotary import Rotary, rotary_of
from triptych.model.stock_language import StockLanguage
from triptych.obs import metrics

log = logging.getLogger(__name__)

HEAD_NAME = "lm_head.weight"
EMBEDDING_NAME = "embed_tokens.weight"
LAYER_TENSORS = frozenset(
    f"{name}.{kind}"
    for name in (
        *(f"self_attn.{which}_proj" for which in "qkvo"),
        *(f"mlp.{which}_proj" for which in ("gate", "up", "down")),
        *("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
    )
    for kind in ("weight", "bias")
)
MOST_TIED_SHARE = 4
"""A tied head is packed, which takes its memory twice, when it is at most one such part of all weights."""

Language = TypeVar("Language", bound=StockLanguage)


@dataclass(frozen=True, slots=True)
class LanguageWeights:
    """Where they are.

    Attributes:
        whole: the architecture's class on the meta device; `model` is the text model within.
        index: every tensor of the checkpoint.
        names: those of the text model: name within it -> in the checkpoint.
    """

    adapter: Adapter
    whole: Any
    model: Any
    index: Mapping[str, Path]
    names: Mapping[str, str]

    def load(self, stock: type[StockLanguage], dtype: torch.dtype, device: torch.device) -> LanguagePart:
        """The part that suits them best. Raises StartupError."""
        if device.type != "cpu":
            return self.load_stock(stock, dtype, device)
        reason = self._unknown(dtype)
        if reason is None:
            return self.load_own(dtype, device)
        metrics.FALLBACKS.labels("stock_decoder").inc()
        log.info("the language model runs through transformers' modules", extra={"reason": reason})
        return self.load_stock(stock, dtype, device)

    def load_own(self, dtype: torch.dtype, device: torch.device) -> OwnLanguage:
        """Tensor by tensor: the next one is read when one is packed, and the head, the largest, before all others.

        Raises StartupError.
        """
        self._check_head()
        shapes = shapes_of(self.model)
        num_parameters = sum(shape.numel() for shape in shapes.values())
        is_tied = self.whole.config.tie_word_embeddings
        head = None if is_tied else self._packed_head(dtype, device)
        builder = DecoderBuilder(shapes, dtype, device)
        for name, tensor in read_part(shapes, self.index, self.names, builder.room, "language"):
            builder.take(name, tensor)
        table = builder.others[EMBEDDING_NAME]
        if head is None:
            is_small = table.numel() * MOST_TIED_SHARE <= num_parameters
            head = make_linear(table) if is_small else Linear(table)
        else:
            num_parameters += head.num_parameters
        config, kv = self.model.config, self.adapter.kv_shape
        decoder = Decoder(
            table=table,
            layers=builder.layers(),
            norm=builder.others["norm.weight"],
            head=head,
            rotary=self._rotary(device),
            num_heads=int(config.num_attention_heads),
            num_kv_heads=kv.num_kv_heads,
            head_dim=kv.head_dim,
            epsilon=float(config.rms_norm_eps),
        )
        return OwnLanguage(decoder, num_parameters, self.adapter.num_embedding_levels)

    def load_stock(self, part: type[Language], dtype: torch.dtype, device: torch.device) -> Language:
        """In transformers' own modules. Raises StartupError."""
        self._check_head()
        model = self.model
        load_part(model, self.index, self.names, dtype, device, "language")
        model.rotary_emb = type(model.rotary_emb)(model.config).to(device)
        check_loaded(model, "language")
        tied = self.whole.config.tie_word_embeddings
        head = model.embed_tokens.weight.detach() if tied else self._read_head(dtype, device)
        model.train(False)
        return part(model, head, self.adapter.num_embedding_levels)

    def _unknown(self, dtype: torch.dtype) -> str | None:
        """Why our own decoder cannot take them; None when it can."""
        if dtype not in PACKED_DTYPES:
            return f"{dtype} on a CPU"
        if getattr(self.model.config, "hidden_act", None) != "silu":
            return "an activation other than silu"
        within = {name.split(".", 2)[2] for name in shapes_of(self.model) if name.startswith("layers.")}
        unknown = sorted(within - LAYER_TENSORS)
        return f"a layer has {unknown[0]}" if unknown else None

    def _check_head(self) -> None:
        """Raises StartupError for a head that is missing, or tied by the config and not by its weights."""
        if not self.whole.config.tie_word_embeddings:
            if HEAD_NAME not in self.index:
                raise StartupError(
                    f"the checkpoint lacks the tensor {HEAD_NAME!r}, and its config does not tie the head"
                )
            return
        names = (HEAD_NAME, self.names.get(EMBEDDING_NAME, ""))
        if all(name in self.index for name in names) and not is_same_tensor(self.index, *names):
            raise StartupError(
                f"{CONFIG_FILE} ties the head to the embeddings, but {HEAD_NAME!r} has weights of its own"
            )

    def _read_head(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        load_part(self.whole.lm_head, self.index, {"weight": HEAD_NAME}, dtype, device, "language head")
        head: torch.Tensor = self.whole.lm_head.weight.detach()
        return head

    def _packed_head(self, dtype: torch.dtype, device: torch.device) -> Linear:
        shapes = shapes_of(self.whole.lm_head)
        places = Places(dtype, device, shapes["weight"].numel())
        names = {"weight": HEAD_NAME}
        ((_, head),) = read_part(shapes, self.index, names, lambda _, shape: places.of(0, shape), "language head")
        return make_linear(head)

    def _rotary(self, device: torch.device) -> Rotary:
        num_axes = len(self.adapter.positions(1, ())[0])
        return rotary_of(type(self.model.rotary_emb)(self.model.config).to(device), num_axes)
