"""The layers of a decoder, one idea a file."""
