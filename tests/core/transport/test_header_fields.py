"""`bridge.core.transport.header_fields`: header blocks, beside the public hpack library."""

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.core.transport.frames import Http2Error
from bridge.core.transport.header_fields import HeaderReader, HeaderWriter


def read_block(reader, block):
    """Return what a reader makes of one header block, in two frames."""
    reader.begin(1, block[: len(block) // 2], end_stream=False)
    reader.go_on(block[len(block) // 2 :])
    return reader.finish()


@settings(max_examples=100, deadline=None)
@given(
    blocks=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from([":status", "grpc-status", "grpc-message", "x-a", "x-b"]),
                st.text("abc~ é\0", max_size=200),
            )
        ),
        max_size=8,
    ),
    huffman=st.booleans(),
    size=st.sampled_from([None, 0, 60, 4096]),
)
def test_header_blocks_are_read_as_a_public_encoder_writes_them(blocks, huffman, size):
    encoder, reader = hpack.Encoder(), HeaderReader(65536)
    for index, fields in enumerate(blocks):
        if size is not None and index == 2:
            encoder.header_table_size = size
        wire = encoder.encode([(k.encode(), v.encode("latin-1")) for k, v in fields], huffman=huffman)
        assert read_block(reader, wire) == fields


def test_header_blocks_are_written_so_that_a_public_decoder_reads_them():
    writer, reader = HeaderWriter(), hpack.Decoder(1 << 20)
    fields = [("a", "b" * size) for size in (0, 1, 126, 127, 128, 254, 255, 300, 20_000)]
    for size in (None, 0, 100, 4096):
        if size is not None:  # a peer that grants less is told by the next block that less is used
            writer.setting_changed(1, 4096)
            writer.setting_changed(1, size)
            reader.max_allowed_table_size = size
        assert reader.decode(writer.pack(fields)) == fields


def test_settings_without_end_take_no_memory_of_the_header_writer():
    writer = HeaderWriter()
    for _ in range(1000):
        writer.setting_changed(1, 0)
        writer.setting_changed(1, 4096)
    assert len(writer.pack([("a", "b")])) < 20


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # index 0
        b"\xff\xff\xff\xff\xff\xff\xff",  # an integer without end
        b"\xbe",  # beyond the table
        b"\x3f\xff\xff\x7f",  # a table that was not granted
        b"\x88\x20",  # its size within a block
        b"\x00\x01a\x81\x18",  # 'a' is 00011, and padding is of ones, not of zeros
        b"\x00\x01a\x84\xff\xff\xff\xff",  # the end mark
        b"\x00\x05ab",
    ],
)
def test_header_blocks_that_no_encoder_makes_are_refused(block):
    with pytest.raises(Http2Error) as caught:
        read_block(HeaderReader(1000), block)
    assert caught.value.code == 9


def test_header_fields_are_bounded():
    with pytest.raises(Http2Error, match="more than 1000 bytes") as caught:
        read_block(HeaderReader(1000), HeaderWriter().pack([("a", "b" * 2000)]))
    assert caught.value.code == 11
    indexed = b"\x40\1a\x7f\x29" + b"b" * 168 + b"\xbe" * 100  # one field, a hundred times
    with pytest.raises(Http2Error, match="more than 1000 bytes"):
        read_block(HeaderReader(1000), indexed)
