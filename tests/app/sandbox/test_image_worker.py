"""Files that are odd, as the image worker decodes them."""

import io
import struct

import pytest
from PIL import Image

from llmbox.app.sandbox.image_worker import decode

TEXT_AS_FLOATS = struct.pack("<HHII", 0x02BC, 12, 1, 60)
"""XMP data as a number: Pillow writes EXIF data anew where it turns a picture, and fails at this."""


@pytest.mark.parametrize(("orientation", "size"), [(1, (8, 4)), (3, (8, 4)), (6, (4, 8)), (9, (8, 4))])
def test_odd_exif_data_do_not_refuse_a_picture(orientation, size):
    turn = struct.pack("<HHII", 0x0112, 3, 1, orientation)
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 2) + turn + TEXT_AS_FLOATS + bytes(68)
    file = io.BytesIO()
    Image.new("RGB", (8, 4)).save(file, "JPEG", exif=exif)
    assert decode(file.getvalue(), 1000).size == size
