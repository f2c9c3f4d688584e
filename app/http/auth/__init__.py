"""Authentication and authorization: the caller's identity and the routes open to it."""
