"""Images of requests: fetching, decoding within limits, and resizing as a model wants them."""
