"""Models from the Hugging Face hub: metadata through its client, bytes and checks through our own code.

`web` and `transfer` fetch, because a download must be checked, capped, paused and resumed; `listing` asks
the hub's own client, which knows its protocol; `layout` writes the cache as that client does, so that both
can use it.
"""
