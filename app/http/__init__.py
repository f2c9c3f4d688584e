"""HTTP layer: the server, the checks that hold for every route, and the routes."""
