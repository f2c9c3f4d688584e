"""Access control: keys, identities, rate limits, sessions and one-time links. Independent of any HTTP
framework.
"""
