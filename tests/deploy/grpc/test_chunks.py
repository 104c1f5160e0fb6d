import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.deploy.grpc import chunks
from pliant.deploy.grpc.chunks import CHUNK_BYTES, FrameJoiner, FrameTooLarge, iter_chunks
from pliant.deploy.settings import MalformedMessage

SIZES = st.sampled_from([0, 1, 2, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])


@given(frames=st.lists(st.lists(SIZES, max_size=4), max_size=3))
def test_frames_survive_their_chunks_and_no_message_is_large(frames):
    frames = [[os.urandom(size) for size in sizes] for sizes in frames]
    joiner = FrameJoiner(lambda: 10 * CHUNK_BYTES)
    messages = [list(iter_chunks(*buffers)) for buffers in frames]
    assert all(len(m) <= chunks.MAX_MESSAGE_BYTES for chunked in messages for m in chunked)
    joined = [[joiner.add(message) for message in chunked] for chunked in messages]
    assert all(frame is None for chunked in joined for frame in chunked[:-1])
    assert [chunked[-1].read() for chunked in joined] == [b"".join(parts) for parts in frames]


def test_a_frame_is_refused_as_soon_as_it_is_too_large():
    joiner = FrameJoiner(lambda: CHUNK_BYTES + 1)
    first, *_ = iter_chunks(bytes(10 * CHUNK_BYTES))
    assert joiner.add(first) is None
    with pytest.raises(FrameTooLarge):
        joiner.add(first)


@pytest.mark.parametrize("message", [b"", b"\x00", b"\x02junk"])
def test_what_is_no_chunk_is_refused(message):
    with pytest.raises(MalformedMessage, match="a chunk of a frame"):
        FrameJoiner(lambda: 100).add(message)


def test_a_large_frame_is_on_disk_without_a_name(tmp_path):
    joiner = FrameJoiner(lambda: 10**9, lambda: chunks.open_spooled(tmp_path))
    body = os.urandom(3 * CHUNK_BYTES)
    *_, frame = [joiner.add(message) for message in iter_chunks(body)]
    assert os.fstat(frame.fileno()).st_size == len(body)
    assert list(tmp_path.iterdir()) == []
    with frame:
        assert frame.read() == body
