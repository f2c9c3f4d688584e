"""Models from the Hugging Face hub: listings through its own client, bytes and checks through our own code.

`http` and `transfer` fetch, because a download must be checked, capped, paused and resumed; `repo_files` asks
the hub's own client, which knows its protocol; `cache_layout` writes the cache as that client does, so that
both can use it.
"""
