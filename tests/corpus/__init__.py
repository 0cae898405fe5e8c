"""The media that people send, good and bad, made from nothing: the same bytes each time. docs/media.md says what
becomes of each kind; a test holds that table against the samples."""
