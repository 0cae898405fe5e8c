"""What the config of a language model must say, whatever its family. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.model.checkpoint_files import Table


def check_full_attention(text: Table) -> None:
    """Raises StartupError unless every layer sees everything before it."""
    if text.values.get("use_sliding_window"):
        text.refuse("use_sliding_window", "and attention in sliding windows cannot be served yet")
    kinds = text.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        text.refuse("layer_types", "and only full attention can be served yet")


def check_rope(text: Table, rope: Table, served: Sequence[str]) -> None:
    """Raises StartupError for a base that is missing, and for a kind that is not `served`: those whose frequencies
    depend on nothing but the config. Others change with the length of whatever else is in the batch."""
    (rope if "rope_theta" in rope else text).number("rope_theta")
    kind_field = "rope_type" if "rope_type" in rope else "type"
    if rope.values.get(kind_field, "default") not in served:
        rope.refuse(kind_field, f"and only {', '.join(served)} can be served")
