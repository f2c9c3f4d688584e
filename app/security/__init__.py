"""Who may do what: keys, identities, rates, sessions and one-time links. Knows nothing of HTTP frameworks."""
