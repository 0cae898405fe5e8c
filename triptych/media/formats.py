"""The formats of pictures that are taken: what the router lets through is what a media process opens."""

from __future__ import annotations

from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

# Importing these registers them; a format that is not registered would make Pillow import all it has. The JPEG plugin
# also opens MPO, which is a phone's JPEG with further pictures behind the one that is shown.
_PLUGINS = (
    PngImagePlugin.PngImageFile,
    JpegImagePlugin.JpegImageFile,
    WebPImagePlugin.WebPImageFile,
    GifImagePlugin.GifImageFile,
    BmpImagePlugin.BmpImageFile,
)
# For `Image.open`, which then tries no other.
PILLOW_FORMATS = tuple(plugin.format for plugin in _PLUGINS)
