"""Commands that find, fetch, convert, load and run models."""
