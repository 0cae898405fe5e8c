"""Tensor frames: what is sent comes back, and whatever else comes is refused in a sentence."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from triptych.core.errors import InvalidRequest, TriptychError
from triptych.mm.tensor import HEADER_BYTES, MAX_TENSOR_BYTES, TensorDtype, TensorValue

floats = arrays.arrays(
    st.sampled_from([np.float32, np.float16]),
    arrays.array_shapes(min_dims=1, max_dims=4, max_side=5),
    elements=st.floats(-1000, 1000, width=16),
)


def frame_by_hand(
    data: bytes,
    shape: tuple[int, ...],
    *,
    magic: bytes = b"TPTN",
    version: int = 1,
    code: int = 1,
    num_dims: int | None = None,
    zero: int = 0,
) -> bytes:
    """The layout that docs/items.md publishes, without our code."""
    sizes = [*shape, *([0] * (4 - len(shape)))]
    head = magic + bytes([version, code, len(shape) if num_dims is None else num_dims, zero])
    return head + b"".join(size.to_bytes(8, "little") for size in sizes) + data


DATA = struct.pack("<6f", 1, 2, 3, 4, 5, 6)


@given(floats)
def test_what_is_sent_comes_back(array: np.ndarray) -> None:
    value = TensorValue.from_array(array)
    code = 1 if array.dtype == np.float32 else 3
    assert value.to_frame() == frame_by_hand(array.tobytes(), array.shape, code=code)
    again = TensorValue.from_frame(value.to_frame())
    assert again == value
    assert again.frame_bytes == len(value.to_frame())
    assert np.array_equal(np.frombuffer(again.data, array.dtype).reshape(again.shape), array)


def test_a_view_with_strides_is_sent_as_what_it_shows() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (whole.T, whole[::2, ::-1], np.broadcast_to(whole[0], (3, 6)), whole.astype(">f4")):
        value = TensorValue.from_array(view)
        assert np.array_equal(np.frombuffer(value.data, "<f4").reshape(value.shape), view)


def test_bfloat16_comes_as_bytes() -> None:
    rows = torch.tensor([[1.5, -2.0], [0.0, 3.0]], dtype=torch.bfloat16)
    value = TensorValue.from_bytes("bfloat16", (2, 2), rows.view(torch.uint8).numpy().tobytes())
    assert value.to_frame()[5] == 2
    back = torch.frombuffer(bytearray(TensorValue.from_frame(value.to_frame()).data), dtype=torch.bfloat16)
    assert torch.equal(back.view(2, 2), rows)


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        pytest.param(b"", "header is cut short", id="nothing"),
        pytest.param(frame_by_hand(DATA, (2, 3))[:39], "header is cut short", id="a header cut short"),
        pytest.param(frame_by_hand(DATA[:-1], (2, 3)), "cut short: 23 bytes of 24", id="elements cut short"),
        pytest.param(frame_by_hand(b"", (2, 3)), "cut short: 0 bytes", id="no elements"),
        pytest.param(frame_by_hand(DATA + b"\0", (2, 3)), "1 bytes follow", id="a trailing byte"),
        pytest.param(frame_by_hand(DATA, (2, 3), magic=b"\x89PNG"), "no tensor frame", id="another file"),
        pytest.param(frame_by_hand(DATA, (2, 3), version=2), "no tensor frame", id="another version"),
        pytest.param(frame_by_hand(DATA, (2, 3), zero=1), "no tensor frame", id="a flag of the future"),
        pytest.param(frame_by_hand(DATA, (2, 3), code=0), "number format", id="number format 0"),
        pytest.param(frame_by_hand(DATA, (2, 3), code=4), "number format", id="number format 4"),
        pytest.param(frame_by_hand(DATA, (2, 3), code=255), "number format", id="number format 255"),
        pytest.param(frame_by_hand(DATA, (), num_dims=0), "1 to 4 dimensions", id="a scalar"),
        pytest.param(frame_by_hand(DATA, (2, 3), num_dims=5), "1 to 4 dimensions", id="five dimensions"),
        pytest.param(frame_by_hand(DATA, (2, 3, 1), num_dims=2), "1 to 4 dimensions", id="a size too many"),
        pytest.param(frame_by_hand(DATA, (2, 3), num_dims=3), "between 1 and", id="a size too few"),
        pytest.param(frame_by_hand(b"", (0, 3)), "between 1 and", id="an empty tensor"),
        pytest.param(frame_by_hand(DATA, (2**64 - 2, 3)), "between 1 and", id="minus two rows"),
        pytest.param(frame_by_hand(DATA, (2**63, 2)), "between 1 and", id="a size whose product overflows"),
        pytest.param(frame_by_hand(DATA, (2**28, 2**28)), "at most", id="sizes whose product is huge"),
        pytest.param(frame_by_hand(DATA, (2**16, 2**16, 2**16, 2**16)), "at most", id="a product of zero mod 2**64"),
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        TensorValue.from_frame(frame)


@given(st.binary(max_size=80) | st.binary(max_size=60).map(lambda tail: b"TPTN\x01" + tail))
def test_any_bytes_are_a_tensor_or_an_error_of_ours(raw: bytes) -> None:
    try:
        value = TensorValue.from_frame(raw)
    except TriptychError:
        return
    assert value.to_frame() == raw


@given(st.data())
def test_no_changed_byte_of_a_header_goes_unnoticed(data: st.DataObject) -> None:
    """Another number format of the same size is the one change that a frame cannot tell: the identity does."""
    frame = frame_by_hand(DATA, (2, 3))
    at, value = data.draw(st.integers(0, HEADER_BYTES - 1)), data.draw(st.integers(0, 255))
    changed = frame[:at] + bytes([value]) + frame[at + 1 :]
    if changed != frame:
        with pytest.raises(InvalidRequest):
            TensorValue.from_frame(changed)


def test_elements_of_other_kinds_are_refused() -> None:
    for dtype in (np.float64, np.int32, np.int8, np.uint8, np.complex64, np.bool_):
        with pytest.raises(InvalidRequest, match="must be float32"):
            TensorValue.from_array(np.zeros((2, 2), dtype))
    with pytest.raises(InvalidRequest, match="must be float32"):
        TensorValue.from_bytes("object", (1,), b"1234")


@pytest.mark.parametrize("shape", [(-1, 6), (6, -1), (0,), (), (1, 1, 1, 1, 6), (2**40, 2**40)])
def test_shapes_out_of_bounds_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest):
        TensorValue.from_bytes("float32", shape, DATA)


def test_the_largest_is_bounded() -> None:
    elements = MAX_TENSOR_BYTES // 4
    with pytest.raises(InvalidRequest, match="at most"):
        TensorValue(TensorDtype.FLOAT32, (elements + 1,), memoryview(b""))
    with pytest.raises(InvalidRequest, match="cut short"):
        TensorValue(TensorDtype.FLOAT32, (elements,), memoryview(b""))


# --- finite -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50), st.sampled_from(["float16", "bfloat16"]))
def test_finite_is_what_torch_says_of_every_16_bit_pattern(words: list[int], dtype: str) -> None:
    raw = np.array(words, "<u2").tobytes()
    truth = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
    assert TensorValue.from_bytes(dtype, (len(words),), raw).is_finite() == bool(torch.isfinite(truth).all())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_finite_is_what_numpy_says_of_every_32_bit_pattern(words: list[int]) -> None:
    raw = np.array(words, "<u4").tobytes()
    truth = bool(np.isfinite(np.frombuffer(raw, "<f4")).all())
    assert TensorValue.from_bytes("float32", (len(words),), raw).is_finite() == truth


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, (1 << 20) - 1, 1 << 20, (1 << 20) + 4])
def test_one_bad_element_anywhere_is_seen(bad: float, at: int) -> None:
    array = np.zeros((1 << 20) + 5, np.float32)
    assert TensorValue.from_array(array).is_finite()
    array[at] = bad
    assert not TensorValue.from_array(array).is_finite()


# --- nobody can change it ---------------------------------------------------------------------------------------------


def test_elements_cannot_be_changed_by_whoever_gave_or_got_them() -> None:
    array = np.ones((2, 3), np.float32)
    buffer = bytearray(array.tobytes())
    values = [
        TensorValue.from_array(array),
        TensorValue.from_bytes("float32", (2, 3), buffer),  # type: ignore[arg-type]
        TensorValue(TensorDtype.FLOAT32, (2, 3), memoryview(buffer)),
        TensorValue(TensorDtype.FLOAT32, (2, 3), memoryview(buffer).toreadonly()),
        TensorValue(TensorDtype.FLOAT32, (2, 3), memoryview(array)),
    ]
    before = [hash(value.data) for value in values]
    array[:] = 7
    buffer[:] = bytes(24)
    for value, was in zip(values, before, strict=True):
        assert np.frombuffer(value.data, np.float32).tolist() == [1.0] * 6
        assert hash(value.data) == was
        with pytest.raises(TypeError):
            value.data[0] = 1
        assert not np.frombuffer(value.data, np.float32).flags.writeable
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.shape = (6,)  # type: ignore[misc]
