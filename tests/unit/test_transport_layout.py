"""Fingerprints tell every difference that would misread bytes; the checksum is the published one."""

from __future__ import annotations

import hashlib
import itertools
import sys

import pytest

from triptych.core.kv_format import KvDtype, PageFormat
from triptych.kv.pages import PageLayout
from triptych.transport.layout import checksum64, embedding_layout_fingerprint, host_id, kv_layout_fingerprint

MODEL = b"m" * 32
FORMAT = PageFormat(16, KvDtype.FLOAT32)


def test_every_field_counts() -> None:
    prints = [
        embedding_layout_fingerprint("float32", 8, 1, MODEL),
        embedding_layout_fingerprint("bfloat16", 8, 1, MODEL),
        embedding_layout_fingerprint("float32", 1, 8, MODEL),
        embedding_layout_fingerprint("float32", 81, 1, MODEL),
        embedding_layout_fingerprint("float32", 8, 11, MODEL),
        embedding_layout_fingerprint("float32", 8, 1, b"n" * 32),
        *(kv_layout_fingerprint(*sizes, MODEL) for sizes in itertools.permutations((1, 2, 3))),
        kv_layout_fingerprint(1, 2, 3, b"n" * 32),
    ]
    assert len(set(prints)) == len(prints) and {len(entry) for entry in prints} == {32}


def test_a_fingerprint_is_sha256_over_length_prefixed_fields() -> None:
    fields = [b"triptych.layout.v1", b"embedding", sys.byteorder.encode(), b"float32", b"8", b"1", MODEL]
    raw = b"".join(len(entry).to_bytes(8, "little") + entry for entry in fields)
    assert embedding_layout_fingerprint("float32", 8, 1, MODEL) == hashlib.sha256(raw).digest()


def test_the_number_of_pages_comes_from_the_arena() -> None:
    layout = PageLayout(num_planes=4, cell_bytes=1024, format=FORMAT)
    assert layout.page_bytes == 4096 and layout.num_pages_in(4096 * 7) == 7
    for arena_bytes, odd in ((4097, layout), (4096, PageLayout(4, 0, FORMAT)), (4096, PageLayout(3, 1024, FORMAT))):
        with pytest.raises(ValueError, match="whole pages"):
            odd.num_pages_in(arena_bytes)


def test_the_host_is_the_same_each_time_and_names_nothing() -> None:
    assert host_id() == host_id() and len(host_id()) == 32
    int(host_id(), 16)


def test_the_checksum_is_xxh3_64_of_any_buffer() -> None:
    assert checksum64(b"") == 0x2D06800538D394C2
    data = bytes(range(256)) * 5
    assert checksum64(data) == checksum64(memoryview(bytearray(data))) != checksum64(data[:-1])
